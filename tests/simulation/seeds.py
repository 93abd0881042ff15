"""What a seed means: a setup, a list of faults, and the run of both in a process of its own."""

import fcntl
import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ctr_ps.protos.placement import ShardMap
from ctr_ps.ps_server.precompile import KERNELS
from ctr_ps.ps_server.rpc import service
from ctr_ps.ps_server.settings import LogSync
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.precompile import precompile
from tests.simulation import checks
from tests.simulation.cluster import (
    COUNTERS,
    CUT,
    DISK,
    KILL,
    LEAVE,
    MOVE,
    NAMES,
    PAUSE,
    POWER,
    STEP_S,
    TORN,
    TWIN,
    WIPE,
    Cluster,
    Fault,
    Outcome,
    Setup,
    TraceHandler,
    prepared,
    write_data,
)
from tests.simulation.counters import COUNTERS as COUNTER_TABLE
from tests.simulation.network import (
    CALL_FAULTS,
    CLIENT_DIES_AFTER,
    CLIENT_DIES_BEFORE,
    CLIENT_REPLACED,
    CLIENT_REPLACED_AFTER,
    CUTS,
    DOUBLED,
    HAVE_SECONDS,
    LATE_REQUEST,
    LOST_REQUEST,
    OF_MESSAGES,
    OF_SERVERS,
    SERVER_DIES_AFTER,
    SERVER_DIES_BEFORE,
    SLOW,
    CallFault,
)
from tests.simulation.world import World, entered

INLINE_VALUES = service.INLINE_VALUES
AnyFault = Fault | CallFault
Run = tuple[int, Setup, Sequence[AnyFault]]
RUNS_IN_FORK = 8  # what they change, and worlds that have ended, stay in memory

# How often a worker makes each call to a server, about.
OF_ALL = {"Join": 2, "CreateTable": 1, "Renew": 10, "Snapshot": 4, "Save": 4, "Leave": 1}
OF_STEPS = {
    "PushPull": 20,
    "PushGrad": 1,
    "AllReduce": 3,
    "Barrier": 1,
    "PullDense": 2,
    "WaitVersion": 5,
}
OF_MODES = {
    "sync": OF_STEPS,
    "half_async": OF_STEPS,
    "async": {"PushGrad": 12, "PullSparse": 12, "PullDense": 16, "AllReduce": 3, "Barrier": 1},
    COUNTERS: {"PushGrad": 40, "PullSparse": 12, "Barrier": 3},
}
OF_MOVES = {"BeginMove": 1, "TakeMoved": 4, "PutMoved": 4, "HoldMove": 3, "GetJobState": 1}
OF_MOVES |= {"PrepareMove": 1, "EndMove": 2, "GetMap": 3}
MOVES_SHARE = 0.5
ARRIVALS = ("AllReduce", "Barrier")
NEVER_S = 1e6
REPLACED = (CLIENT_REPLACED, CLIENT_REPLACED_AFTER)
OF_DATA = {"sync": "PushPull", "half_async": "PushPull", "async": "PushGrad", COUNTERS: "PushGrad"}


MIXED, SAVES, PLACES, MESSAGES, DISKS, BATCHES, OUTAGES = (
    *("mixed", "saves", "places", "messages", "disks", "batches", "outages"),
)
THEMES = (MIXED, SAVES, PLACES, MESSAGES, MIXED, DISKS, BATCHES, SAVES, MIXED, PLACES, OUTAGES)
"""What most of the faults of a seed are about, in turn: chance alone rarely brings what belongs together."""


def theme_of(seed: int) -> str:
    return THEMES[seed % len(THEMES)]


def setup_of(seed: int) -> Setup:
    """Returns the cluster and the job of a seed."""
    random, theme = Random(f"setup {seed}"), theme_of(seed)
    every = [("checkpoint.every_steps=1",), ("checkpoint.every_s=1.5",)]
    saves: tuple[str, ...] = random.choice(
        every[:1] + every if theme == SAVES else [(), *every * 2]
    )
    is_delta = random.random() < (0.6 if theme == SAVES else 0.3)
    deltas = ("checkpoint.mode=delta", "checkpoint.full_every=3") if is_delta else ()
    num_workers = random.choice((2, 2, 3) if theme in (PLACES, OUTAGES) else (1, 2, 2, 3))
    modes = ("sync", "sync", "sync", COUNTERS, COUNTERS, COUNTERS, "half_async", "async")
    if theme in (SAVES, PLACES):
        modes = ("sync", "sync", "sync", COUNTERS, COUNTERS, "half_async")
    elif theme == BATCHES:
        modes = ("half_async", "async", "async")
    moves = Random(f"moves {seed}").random() < MOVES_SHARE and theme != OUTAGES
    setup = Setup(
        num_spares=3 if moves else 0,
        snapshot_s=0.5 if moves else 0.0,
        mode=random.choice(modes),
        num_servers=random.choice((1, 2, 2, 3)),
        num_workers=num_workers,
        log_sync=random.choice((LogSync.OS, LogSync.FSYNC)) if theme != DISKS else LogSync.FSYNC,
        settings=(*saves, *deltas),
        epochs=random.choice({PLACES: (2,), BATCHES: (1, 2)}.get(theme, (1, 1, 2)))
        if num_workers == 2
        else 1,
        in_threads=random.random() < 0.6,
        apply_s=random.choice((0.0, 0.005, 0.03)),
        pace_s=random.choice((0.02, 0.2, 1.0)),
        step_s=random.choice((STEP_S, STEP_S, (0.0, 0.3))),
        late_s=random.choice((0.0, 8.0) if theme == PLACES else (0.0, 0.0, 8.0)),
        threads=random.choice((1, 3)) if theme == BATCHES else 1,
        has_log=theme != MESSAGES or random.random() < 0.5,
    )
    if theme == OUTAGES:  # everything takes long: longer than a server is waited for
        replay_s = random.choice((0.0, 5.0 if setup.mode == COUNTERS else 10.0))
        settings = () if replay_s else setup.settings  # all of the log is carried out again
        return replace(
            setup, wait_limit_s=400.0, replay_s=replay_s, epochs=1, late_s=0.0, settings=settings
        )
    if (
        setup.mode in ("async", "half_async")
        and num_workers > 1
        and theme == MIXED
        and Random(f"queue {seed}").random() < 0.5
    ):
        at_start = random.choice((1, num_workers - 1))
        return replace(setup, num_at_start=at_start, continues=random.random() < 0.5, epochs=2)
    return setup


def faults_of(seed: int, setup: Setup) -> list[AnyFault]:
    """Returns what happens to a seed's cluster; an undisturbed one takes 5 to 20 s."""
    theme = theme_of(seed)
    faults = _Faults(Random(f"faults {seed}"), setup, theme)
    if theme == OUTAGES:
        return faults.outages()
    if theme == MESSAGES:
        return faults.messages()
    return [
        each for _ in range(faults.random.choice((1, 2, 4, 6, 9, 12))) for each in faults.some()
    ] + moves_of(seed, setup)


def moves_of(seed: int, setup: Setup) -> list[AnyFault]:
    """Returns moves of shards, and what goes wrong with their calls."""
    if not setup.num_spares:
        return []
    random = Random(f"moves of {seed}")
    length_s = 6.0 if (setup.pace_s if setup.mode == COUNTERS else setup.step_s[1]) < 1.0 else 20.0
    found: list[AnyFault] = []
    servers = [f"server.{index}" for index in range(setup.num_servers + setup.num_spares)]
    for number in range(random.choice((1, 2, 3))):
        driver = f"driver.{number}"
        kind = random.choice(("add", "add", "drain", "replace"))
        at = random.uniform(0.5, length_s)
        found.append(Fault(MOVE, at, driver, kind))
        if random.random() < 0.3:
            found.append(Fault(KILL, at + random.uniform(0.0, 2.0), driver))
        for _ in range(random.choice((0, 0, 1, 2))):
            call = random.choice(list(OF_MOVES))
            fault_kind = random.choice((*CALL_FAULTS[:-1], *OF_SERVERS))
            seconds = random.choice((0.03, 1.0, 6.0)) if fault_kind in HAVE_SECONDS else 0.0
            server = random.choice(servers[: setup.num_servers + 1 + number])
            number_of_call = random.randrange(OF_MOVES[call])
            found.append(CallFault(fault_kind, driver, server, call, number_of_call, seconds))
    return found


class _Faults:
    """Makes the faults of a seed: single ones, and such as belong together."""

    def __init__(self, random: Random, setup: Setup, theme: str) -> None:
        self.random, self._setup = random, setup
        self._servers = [f"server.{index}" for index in range(setup.num_servers)]
        first = 1 if setup.continues else 0
        self._workers = [f"worker.{index}" for index in range(first, setup.num_workers)]
        self._has_power = setup.log_sync is LogSync.FSYNC
        self._is_apart = False
        self._length_s = 20.0 if setup.step_s == STEP_S else 6.0
        if setup.mode == COUNTERS:
            self._length_s = 2.0 + 18.0 * setup.pace_s
        # About how many checkpoints are saved.
        self._num_saves = 12 if "checkpoint.every_steps=1" in setup.settings else 6
        if setup.mode != COUNTERS and not any(
            each.startswith("checkpoint.every") for each in setup.settings
        ):
            self._num_saves = 1
        general = [self._single, self._call, self._call, self._call, self._save, self._step]
        general += [self._push, self._push, self._return, self._of_disk, self._wipe, self._slow]
        if setup.mode != "async":
            general += [self._end, self._end]
        kinds = {
            SAVES: [self._save, self._save, self._long_save, self._long_save],
            PLACES: [self._at_barrier, self._at_barrier, self._return, self._slow, self._apart],
            DISKS: [self._of_disk],
            BATCHES: [self._gap, self._gap, self._step, self._at_barrier],
        }
        self._kinds = general, kinds.get(theme, general)
        # Half of the faults meet the same two processes: some mistakes show only where several come together.
        self._focus, *self._victims = self._anywhere()

    def _anywhere(self) -> tuple[float, str, str]:
        choice = self.random.choice
        at = self.random.uniform(0.2, self._length_s)
        return at, choice(self._servers), choice(self._workers)

    def _place(self) -> tuple[float, str, str]:
        at, server, worker = self._anywhere()
        if self.random.random() < 0.5:
            at, (server, worker) = max(0.2, self.random.gauss(self._focus, 2.0)), self._victims
        return at, server, worker

    def some(self) -> Sequence[AnyFault]:
        if self._setup.continues:  # not to worker 0, which the others need
            return self.random.choice((self._single, self._push, self._leave))()
        return self.random.choice(self._kinds[self.random.random() < 0.6])()

    def _single(self) -> Sequence[AnyFault]:
        random, (at, server, worker) = self.random, self._place()
        anybody = random.choice((server, worker))
        match random.choice((KILL, KILL, PAUSE, CUT, POWER, TWIN)):
            case "pause":
                return [Fault(PAUSE, at, anybody, seconds=random.choice((0.3, 2.0, 8.0)))]
            case "cut":
                return [Fault(CUT, at, worker, server, seconds=random.uniform(0.1, 6.0))]
            case "power" if self._has_power:
                return [Fault(POWER, at, server)]
            case "twin":
                return [Fault(TWIN, at, anybody)]
        return [Fault(KILL, at, anybody)]

    def _fault(self, kind: str, worker: str, server: str, call: str, number: int) -> CallFault:
        random = self.random
        seconds = random.choice((0.0, 0.03, 1.0, 6.0)) * random.uniform(0.5, 1.5)
        if kind == SLOW:
            seconds = random.choice((0.3, 2.0, 6.0)) * random.uniform(0.5, 1.5)
        elif kind in REPLACED:
            seconds = random.uniform(4.0, 12.0)
        elif kind == CLIENT_DIES_BEFORE and random.random() < 0.3:
            seconds = NEVER_S
        elif kind not in HAVE_SECONDS:
            seconds = 0.0
        power = self._has_power and kind in OF_SERVERS and random.random() < 0.5
        return CallFault(kind, worker, server, call, number, round(seconds, 3), power)

    def _call(self) -> Sequence[AnyFault]:
        random, (_, server, worker) = self.random, self._place()
        calls = OF_MODES[self._setup.mode] if random.random() < 0.75 else OF_ALL
        if self._setup.num_at_start is not None and random.random() < 0.3:
            server, calls = "server.0", {"TakeFile": 6}
        call = random.choice(list(calls))
        number = random.randrange(calls[call])
        return [self._fault(random.choice(CALL_FAULTS), worker, server, call, number)]

    def _save(self) -> Sequence[AnyFault]:
        """Several of the calls that save one checkpoint, or two."""
        random, first = self.random, self.random.randrange(self._num_saves)
        places = [
            (server, call, number)
            for server in self._servers
            for call in ("Snapshot", "Save")
            for number in (first, first + 1)
        ]
        kinds = (*OF_MESSAGES, *OF_SERVERS, DOUBLED, LATE_REQUEST, *REPLACED)
        kinds += (CLIENT_DIES_BEFORE, CLIENT_DIES_AFTER)
        return [
            self._fault(random.choice(kinds), "worker.0", *place)
            for place in random.sample(places, min(random.choice((1, 2, 3)), len(places)))
        ]

    def _step(self) -> Sequence[AnyFault]:
        """A worker dies in a push that has come to some of the servers."""
        random, (_, server, worker) = self.random, self._place()
        call = OF_DATA[self._setup.mode]
        number = random.randrange(OF_MODES[self._setup.mode][call])
        kind = random.choice((CLIENT_DIES_BEFORE, CLIENT_REPLACED))
        lost = random.choice((LOST_REQUEST, LATE_REQUEST))
        others = [each for each in self._servers if each != server]
        return [
            self._fault(kind, worker, server, call, number),
            *(self._fault(lost, worker, each, call, number) for each in others),
        ]

    def _push(self) -> Sequence[AnyFault]:
        """One after another of a worker's calls is lost or comes late; its server may die among them."""
        random, (_, server, worker) = self.random, self._place()
        call = OF_DATA[self._setup.mode]
        first = random.randrange(OF_MODES[self._setup.mode][call])
        kinds = (*OF_MESSAGES, *OF_MESSAGES, *OF_SERVERS)
        return [
            self._fault(random.choice(kinds), worker, server, call, first + offset)
            for offset in range(random.choice((2, 3)))
        ]

    def _end(self) -> Sequence[AnyFault]:
        """Several of the calls with which a pass ends, after the last step but one."""
        random, calls = self.random, OF_MODES[self._setup.mode]
        steps = 24 // self._setup.num_workers
        last = [("PushPull", steps - 2), ("PushGrad", 0), ("AllReduce", 1), ("AllReduce", 2)]
        if self._setup.mode == COUNTERS:
            last = [("Barrier", 1), ("Barrier", 2), ("PushGrad", 38), ("PushGrad", 18)]
        saves = [(call, steps - early) for call in ("Snapshot", "Save") for early in (0, 1, 2)]
        return [
            self._fault(random.choice(CALL_FAULTS), worker, server, call, number)
            for call, number in random.sample([*last, *last, *saves], 4)
            for server in [random.choice(self._servers)]
            for worker in [random.choice(self._workers) if call in calls else "worker.0"]
        ]

    def _return(self) -> Sequence[AnyFault]:
        """A worker is silent for longer than its lease, and comes back; another asks for its place then."""
        random, (at, _, worker) = self.random, self._place()
        silent_s = random.uniform(4.0, 9.0)
        later = at + silent_s + random.uniform(1.0, 6.0)
        dies = [
            Fault(KILL, later + random.choice((random.uniform(-0.8, 0.0), 1.5)), each)
            for each in self._servers
        ]
        stutter = Fault(PAUSE, later - random.uniform(0.0, 1.0), worker, seconds=2.5)
        return [
            Fault(PAUSE, at, worker, seconds=silent_s),
            *random.choice(([], [stutter])),
            Fault(TWIN, later, worker),
            *random.choice(([], dies[:1], dies, dies)),
        ]

    def _apart(self) -> Sequence[AnyFault]:
        """A link is cut for long, but once, as a second process of a worker asks for its place."""
        at, server, worker = self._place()
        if self._is_apart:
            return self._return()
        self._is_apart = True
        number = self.random.randint(2, 5)
        return [
            Fault(TWIN, at, worker),
            CallFault(CUTS, worker, server, "Join", number, 20.0),
        ]

    def _at_barrier(self) -> Sequence[AnyFault]:
        """A worker dies while it waits at a barrier, or as it leaves it."""
        random, (_, server, worker) = self.random, self._place()
        call = random.choice([each for each in OF_MODES[self._setup.mode] if each in ARRIVALS])
        number = random.randrange(OF_MODES[self._setup.mode][call])
        if call == "AllReduce" or self._setup.mode != COUNTERS:
            server = self._servers[0]
        kind = random.choice((CLIENT_DIES_BEFORE, CLIENT_DIES_BEFORE, CLIENT_DIES_AFTER))
        return [CallFault(kind, worker, server, call, number)]

    def _slow(self) -> Sequence[AnyFault]:
        """A server takes long for a push; meanwhile its client is silent, or the server dies soon after."""
        random, (_, server, worker) = self.random, self._place()
        call = OF_DATA[self._setup.mode]
        number = random.randrange(OF_MODES[self._setup.mode][call])
        seconds = round(random.choice((0.3, 2.0, 5.0)) * random.uniform(0.7, 1.1), 3)
        meanwhile = random.choice((CLIENT_DIES_BEFORE, CLIENT_REPLACED, *OF_SERVERS))
        anybody = random.choice((worker, random.choice(self._workers)))
        later = number + random.choice((2, 3, 5, 8, 12, 20))
        return [
            CallFault(SLOW, worker, server, call, number, seconds),
            self._fault(meanwhile, worker, server, call, number + 1),
            self._fault(random.choice(OF_SERVERS), anybody, server, call, later),
        ]

    def _long_save(self) -> Sequence[AnyFault]:
        """A snapshot is late; others go on meanwhile, or die. Its server dies before the next one."""
        random, (_, server, worker) = self.random, self._place()
        number, call = random.randrange(self._num_saves), OF_DATA[self._setup.mode]
        late = round(random.choice((0.3, 2.0, 9.0, 9.0)) * random.uniform(0.6, 1.0), 3)
        dies = random.choice((SERVER_DIES_BEFORE, SERVER_DIES_BEFORE, SERVER_DIES_AFTER))
        place = "worker.0", server
        before = [
            CallFault(random.choice((LATE_REQUEST, DOUBLED)), *place, "Snapshot", number, late),
            self._fault(random.choice((LATE_REQUEST, *REPLACED)), *place, "Save", number),
        ]
        other = self._fault(
            random.choice((CLIENT_DIES_BEFORE, CLIENT_REPLACED, SLOW)),
            *(worker, server, call, number + random.choice((0, 1, 1, 1, 2))),
        )
        return [
            *before[: random.choice((1, 2))],
            *([other] if worker != "worker.0" else []),
            self._fault(dies, *place, "Snapshot", number + 1),
        ]

    def _gap(self) -> Sequence[AnyFault]:
        """A push comes late or not, those after it do, and their worker dies."""
        random, (_, server, worker) = self.random, self._place()
        call = OF_DATA[self._setup.mode]
        number = random.randrange(OF_MODES[self._setup.mode][call])
        late = random.choice((LOST_REQUEST, LATE_REQUEST))
        dies = random.choice((CLIENT_DIES_AFTER, CLIENT_DIES_AFTER, CLIENT_REPLACED))
        return [
            CallFault(late, worker, server, call, number, round(random.uniform(1.0, 6.0), 3)),
            self._fault(dies, worker, server, call, number + random.choice((1, 1, 2))),
        ]

    def messages(self) -> Sequence[AnyFault]:
        """Many messages are lost, late or doubled, while every process lives."""
        random = self.random
        calls = {**OF_MODES[self._setup.mode], **OF_ALL}
        return [
            self._fault(random.choice(OF_MESSAGES), worker, server, call, number)
            for worker in self._workers
            for server in self._servers
            for call, most in calls.items()
            for number in range(most)
            if random.random() < 0.12
        ]

    def _leave(self) -> Sequence[AnyFault]:
        """A worker is told to end; and in half of the cases killed soon after that."""
        at, _, worker = self._place()
        killed = Fault(KILL, at + self.random.uniform(0.0, 3.0), worker)
        return [Fault(LEAVE, at, worker), *([killed] if self.random.random() < 0.5 else [])]

    def _of_disk(self) -> Sequence[AnyFault]:
        """One of a server's syncs fails, or the power in it; soon after that the power, or the process."""
        random, (at, server, _) = self.random, self._place()
        number = random.randint(2, 30)
        if self._has_power and random.random() < 0.5:
            later = float(random.choice((0, 1, 1, 2)))
            return [Fault(TORN, random.randint(1, 6), server, NAMES, later)]
        if not self._has_power:
            return [Fault(DISK, random.randint(2, 12), server)]
        return [
            Fault(random.choice((DISK, TORN, TORN)), number, server),
            random.choice(
                (
                    Fault(TORN, number + random.randint(1, 12), server),
                    Fault(KILL, at + random.uniform(0.0, 5.0), server),
                )
            ),
        ]

    def _wipe(self) -> Sequence[AnyFault]:
        """A server comes back without its log, while no worker lives that would know it.

        It is one of several, and always the same: with all of them a job begins anew.
        """
        if len(self._servers) == 1:
            return self._single()
        at, server = self._place()[0], self._victims[0]
        return [Fault(WIPE, at, server), *(Fault(KILL, at + 0.01, each) for each in self._workers)]

    def outages(self) -> Sequence[AnyFault]:
        """All wait for one worker for minutes, and a server dies at the beginning and towards the end."""
        random, (at, server, worker) = self.random, self._place()
        if self._setup.replay_s:  # one that dies again and again in its recovery is not waited for
            return [Fault(KILL, self._length_s * random.uniform(0.6, 1.0), server)]
        return [
            Fault(PAUSE, at, worker, seconds=150.0),
            Fault(KILL, at + random.uniform(2.0, 4.0), server),
            Fault(KILL, at + random.uniform(125.0, 148.0), server),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one run."""

    seed: int
    setup: Setup
    faults: Sequence[AnyFault]
    outcome: Outcome
    trace: Sequence[str]
    processor_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.outcome.errors

    def told(self) -> str:
        """Returns the trace of a run, as it is to be read."""
        setup, outcome = self.setup, self.outcome
        head = [
            f"seed {self.seed}: {setup.mode}, {setup.num_servers} servers, {setup.num_workers} workers, "
            f"log {setup.log_sync.value}, {'all in threads, ' * setup.in_threads}"
            f"{' '.join(setup.settings) or 'no saves between steps'}",
            *(f"  fault: {each}" for each in self.faults),
        ]
        tail = [f"WRONG: {each}" for each in outcome.errors] or ["all as it should be"]
        return "\n".join([*head, *self.trace, *tail])


class Simulator:
    """Makes runs, each in a fork of this process, which has all that they share."""

    cluster: type[Cluster] = Cluster

    def __init__(self, folder: Path, undisturbed: Path | None = None) -> None:
        """Works in a folder that does not exist yet; `undisturbed` has what undisturbed runs give."""
        self._folder = folder
        folder.mkdir(parents=True)
        write_data(folder, Setup().rows)
        self._plans: dict[Sequence[object], Plan] = {}
        self._undisturbed: dict[tuple[int, int], checks.Undisturbed] = {}
        if undisturbed is not None and undisturbed.exists():
            self._undisturbed = pickle.loads(undisturbed.read_bytes())
        self.tells_switches = False
        self._worlds: list[World] = []  # kept: collected, their greenlets would run their `finally`
        # Now, as it takes real time: in runs nothing may.
        plan = self.plan(Setup())
        precompile(plan)
        for spec in (*plan.specs.tables, plan.specs.dense, COUNTER_TABLE):
            KERNELS.prepare(spec)
        KERNELS.prepare_loading()
        ShardMap.of(2).route(np.zeros(1, np.uint64), 1)  # an undisturbed run has one server
        self.undisturbed(2, 1)  # what a first run imports and builds, forks have, too

        if undisturbed is not None and not undisturbed.exists():
            for num_workers, epochs in ((1, 1), (2, 1), (3, 1), (2, 2)):
                self.undisturbed(num_workers, epochs)
            undisturbed.write_bytes(pickle.dumps(self._undisturbed))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def plan(self, setup: Setup) -> Plan:
        is_queue = setup.num_at_start is not None
        # what its job says
        key = (
            setup.mode,
            setup.epochs,
            setup.wait_limit_s,
            setup.threads,
            setup.settings,
            is_queue,
            setup.continues,
        )
        if key not in self._plans:
            self._plans[key] = prepared(setup, self._folder)
        return self._plans[key]

    def undisturbed(self, num_workers: int, epochs: int) -> checks.Undisturbed:
        """Returns what synchronous training of so many workers gives, on one server, after each step."""
        if (num_workers, epochs) not in self._undisturbed:
            setup = Setup(
                num_servers=1,
                num_workers=num_workers,
                epochs=epochs,
                settings=("checkpoint.every_steps=1",),
                step_s=(1.0, 1.0),  # so that each step is saved
            )
            run = self._folder / f"undisturbed-{num_workers}-{epochs}"

            def of() -> checks.Undisturbed:
                result = self._run_here(0, setup, [], run, is_checked=False)
                assert result.outcome.summaries, result.told()
                return checks.undisturbed(result.outcome, run / "checkpoints")

            self._undisturbed[num_workers, epochs] = of()
        return self._undisturbed[num_workers, epochs]

    def prepare(self, setups: Sequence[Setup]) -> None:
        """Makes what runs of these setups need, so that forks have it."""
        for setup in setups:
            self.plan(setup)
            if setup.mode != COUNTERS:
                self.undisturbed(setup.num_workers, setup.epochs)

    def start(self, runs: Sequence[Run]) -> "Running":
        """Starts runs, one after another, in a fork: the first copies the memory that it changes."""
        self.prepare([setup for _, setup, _ in runs])
        sys.stdout.flush()
        gc.freeze()  # a collection in the fork would copy all that both share
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 2**20)  # so that none waits to be read
        pid = os.fork()
        if pid:
            os.close(write)
            return Running(pid, read, len(runs))
        code = 1
        try:
            os.close(read)
            gc.disable()
            with os.fdopen(write, "wb") as pipe:
                for run in runs:
                    pickle.dump(self._result(*run), pipe)
                    pipe.flush()
            code = 0
        except BaseException:
            logging.getLogger("simulation").exception("%s", runs)
            sys.stderr.flush()
        os._exit(code)

    def _result(self, seed: int, setup: Setup, faults: Sequence[AnyFault]) -> Result:
        folder = self._folder / f"run-{os.getpid():08}"
        try:
            return self._run_here(seed, setup, faults, folder, is_checked=True)
        except Exception:  # a fault of the simulation: others' seeds go on
            outcome = Outcome(errors=[f"the simulation failed: {traceback.format_exc()}"])
            return Result(seed=seed, setup=setup, faults=faults, outcome=outcome, trace=[])
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, seed: int, setup: Setup, faults: Sequence[AnyFault]) -> Result:
        (result,) = self.start([(seed, setup, faults)]).results()
        return result

    def shrunk(self, bad: Result) -> Result:
        """Returns a failing run with as few of its faults as it needs (delta debugging).

        Zeller, Hildebrandt, "Simplifying and isolating failure-inducing input", TSE 2002.
        """
        best, num_parts = bad, 2
        while len(best.faults) > 1:
            size = -(-len(best.faults) // num_parts)
            for start in range(0, len(best.faults), size):
                fewer = [*best.faults[:start], *best.faults[start + size :]]
                result = self.run(best.seed, best.setup, fewer)
                if not result.is_good:
                    best, num_parts = result, max(num_parts - 1, 2)
                    break
            else:
                if size == 1:
                    break
                num_parts = min(2 * num_parts, len(best.faults))
        without = self.run(best.seed, best.setup, [])
        return best if without.is_good else without

    def run_seeds(
        self, seeds: Iterator[int], num_processes: int, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Result]:
        """Yields the results of seeds in their order, with so many runs at a time."""
        setups = ((seed, setup_of(seed)) for seed in takewhile(lambda _: not is_over(), seeds))
        return self.run_all(
            ((seed, setup, faults_of(seed, setup)) for seed, setup in setups), num_processes
        )

    def run_all(self, runs: Iterator[Run], num_processes: int) -> Iterator[Result]:
        """Yields the results of runs in their order, with so many at a time."""
        running: deque[Running] = deque()
        try:
            while True:
                while len(running) < num_processes and (some := [*islice(runs, RUNS_IN_FORK)]):
                    running.append(self.start(some))
                if not running:
                    return
                yield from running.popleft().results()
        finally:
            for each in running:
                each.end()

    def _run_here(
        self,
        seed: int,
        setup: Setup,
        faults: Sequence[AnyFault],
        run: Path,
        *,
        is_checked: bool,
    ) -> Result:
        start = time.process_time()
        run.mkdir()
        os.chdir(run)
        root, handler = logging.getLogger(), TraceHandler()
        root.addHandler(handler)
        service.INLINE_VALUES = 0 if setup.in_threads else INLINE_VALUES
        home = World(seed)
        self._worlds.append(home)
        home.short = {str(run): "~", str(self._folder): "~"}
        home.tells_switches = self.tells_switches
        try:
            with entered(home):
                cluster = self.cluster(home, setup, run, self.plan(setup), list(faults))
                outcome = cluster.run()
        finally:
            root.removeHandler(handler)
        if is_checked:
            outcome.errors += checks.faults_of_end(
                setup,
                outcome,
                cluster.tally,
                run / "checkpoints",
                self._undisturbed.get((setup.num_workers, setup.epochs)),
            )
        outcome.summaries = {
            name: replace(summary, tables=None) for name, summary in outcome.summaries.items()
        }
        return Result(
            seed=seed,
            setup=setup,
            faults=faults,
            outcome=outcome,
            trace=home.trace,
            processor_s=time.process_time() - start,
        )


class Running:
    """Runs in another process."""

    def __init__(self, pid: int, pipe: int, num_runs: int) -> None:
        self._pid, self._pipe, self._num_runs = pid, os.fdopen(pipe, "rb"), num_runs

    def results(self) -> Iterator[Result]:
        """Yields the results as they come, and ends the process."""
        try:
            for _ in range(self._num_runs):
                result: Any = pickle.load(self._pipe)
                assert isinstance(result, Result)
                yield result
        except EOFError:
            raise AssertionError("the simulation itself failed: see above") from None
        finally:
            self.end()

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pipe.close()
