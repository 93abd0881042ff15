"""What a seed means: a setup, a list of faults, and the run of both in a process of its own."""

import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

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
    PAUSE,
    POWER,
    TWIN,
    Cluster,
    Fault,
    Outcome,
    Setup,
    TraceHandler,
    prepared,
    write_data,
)
from tests.simulation.counters import COUNTERS as COUNTER_TABLE
from tests.simulation.network import CALL_FAULTS, CallFault
from tests.simulation.world import World, entered

INLINE_VALUES = service.INLINE_VALUES
AnyFault = Fault | CallFault

# How often a worker makes each call to a server, about; those of data more often than by chance.
OF_ALL = {"Join": 3, "CreateTable": 1, "Renew": 10, "Snapshot": 3, "Save": 3, "Leave": 1}
OF_MODES = {
    "sync": {"PushPull": 20, "AllReduce": 3, "Barrier": 3, "PullSparse": 1, "WaitVersion": 5},
    "half_async": {"PushPull": 20, "AllReduce": 3, "Barrier": 3, "PullSparse": 1, "WaitVersion": 5},
    "async": {"PushGrad": 20, "PullSparse": 20, "PullDense": 20, "Barrier": 3, "AllReduce": 3},
    COUNTERS: {"PushGrad": 40, "PullSparse": 12, "Barrier": 2},
}


def setup_of(seed: int) -> Setup:
    """Returns the cluster and the job of a seed."""
    random = Random(f"setup {seed}")
    saves = random.choice(((), ("checkpoint.every_steps=5",), ("checkpoint.every_s=1.5",)))
    deltas = ("checkpoint.mode=delta", "checkpoint.full_every=3") if random.random() < 0.4 else ()
    return Setup(
        mode=random.choice(("sync", "sync", "sync", COUNTERS, COUNTERS, "half_async", "async")),
        num_servers=random.choice((1, 2, 2, 3)),
        num_workers=random.choice((1, 2, 2, 3)),
        log_sync=random.choice(tuple(LogSync)),
        settings=(*saves, *deltas),
        in_threads=random.random() < 0.4,
    )


def faults_of(seed: int, setup: Setup) -> list[AnyFault]:
    """Returns what happens to a seed's cluster; an undisturbed one takes 10 to 20 s."""
    random = Random(f"faults {seed}")
    servers = [f"server.{index}" for index in range(setup.num_servers)]
    workers = [f"worker.{index}" for index in range(setup.num_workers)]

    def place() -> tuple[float, str, str]:
        return random.uniform(0.2, 20.0), random.choice(servers), random.choice(workers)

    # Half of the faults meet the same two processes: some mistakes show only where several come together.
    focus, *victims = place()

    def fault() -> AnyFault:
        at, server, worker = place()
        if random.random() < 0.5:
            at, (server, worker) = max(0.2, random.gauss(focus, 2.0)), victims
        anybody = random.choice((server, worker))
        match random.choice((KILL, KILL, PAUSE, CUT, POWER, DISK, TWIN, *["call"] * 8)):
            case "kill":
                return Fault(KILL, at, anybody)
            case "pause":
                return Fault(PAUSE, at, anybody, seconds=random.choice((0.3, 2.0, 8.0)))
            case "cut":
                return Fault(CUT, at, worker, server, seconds=random.uniform(0.1, 6.0))
            case "power" if setup.log_sync is LogSync.FSYNC:
                return Fault(POWER, at, server)
            case "power":
                return Fault(KILL, at, server)
            case "twin":
                return Fault(TWIN, at, anybody)
            case "disk":
                return Fault(DISK, random.randint(2, 40), server)
        of_mode = OF_MODES[setup.mode]
        calls = of_mode if random.random() < 0.75 else OF_ALL
        call = random.choices(list(calls), list(calls.values()))[0]
        seconds = round(random.expovariate(1.0), 2)
        number, kind = random.randrange(calls[call]), random.choice(CALL_FAULTS)
        return CallFault(kind, worker, server, call, number, seconds if "late" in kind else 0.0)

    return [fault() for _ in range(random.choice((0, 2, 4, 6, 10, 15)))]


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

    def __init__(self, folder: Path) -> None:
        """Works in a folder that does not exist yet."""
        self._folder = folder
        folder.mkdir(parents=True)
        write_data(folder, Setup().rows)
        self._plans: dict[Setup, Plan] = {}
        self._undisturbed: dict[int, checks.Undisturbed] = {}
        self.tells_switches = False
        # Now, as it takes real time: in runs nothing may.
        plan = self.plan(Setup())
        precompile(plan)
        for spec in (*plan.specs.tables, plan.specs.dense, COUNTER_TABLE):
            KERNELS.prepare(spec)
        KERNELS.prepare_loading()
        self.undisturbed(2)  # what a first run imports and builds, forks have, too

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def plan(self, setup: Setup) -> Plan:
        if setup not in self._plans:
            self._plans[setup] = prepared(setup, self._folder)
        return self._plans[setup]

    def undisturbed(self, num_workers: int) -> checks.Undisturbed:
        """Returns what synchronous training of so many workers gives, on one server, after each step."""
        if num_workers not in self._undisturbed:
            setup = Setup(
                num_servers=1,
                num_workers=num_workers,
                settings=("checkpoint.every_steps=1",),
                step_s=(1.0, 1.0),  # so that each step is saved
            )
            run = self._folder / f"undisturbed-{num_workers}"

            def of() -> checks.Undisturbed:
                result = self._run_here(0, setup, [], run, is_checked=False)
                assert result.outcome.summaries, result.told()
                return checks.undisturbed(result.outcome, run / "checkpoints")

            self._undisturbed[num_workers] = of()
        return self._undisturbed[num_workers]

    def prepare(self, setups: Sequence[Setup]) -> None:
        """Makes what runs of these setups need, so that forks have it."""
        for setup in setups:
            self.plan(setup)
            if setup.mode == "sync":
                self.undisturbed(setup.num_workers)

    def start(self, seed: int, setup: Setup, faults: Sequence[AnyFault]) -> "Running":
        """Starts a run in a fork."""
        self.prepare([setup])
        sys.stdout.flush()
        gc.freeze()  # a collection in the fork would copy all that both share
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            return Running(pid, read)
        code = 1
        try:
            os.close(read)
            gc.disable()
            run = self._folder / f"run-{os.getpid()}"
            result = self._run_here(seed, setup, faults, run, is_checked=True)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(result, pipe)
            shutil.rmtree(run, ignore_errors=True)
            code = 0
        except BaseException:
            logging.getLogger("simulation").exception("seed %d", seed)
            sys.stderr.flush()
        os._exit(code)

    def run(self, seed: int, setup: Setup, faults: Sequence[AnyFault]) -> Result:
        return self.start(seed, setup, faults).result()

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

    def run_all(
        self, seeds: Iterator[int], num_processes: int, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Result]:
        """Yields the results of seeds as they come, with so many runs at a time."""
        running: list[Running] = []
        while True:
            while len(running) < num_processes and not is_over():
                seed = next(seeds, None)
                if seed is None:
                    break
                setup = setup_of(seed)
                running.append(self.start(seed, setup, faults_of(seed, setup)))
            if not running:
                return
            yield running.pop(0).result()

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
        home.short = {str(run): "~", str(self._folder): "~"}
        home.tells_switches = self.tells_switches
        try:
            with entered(home):
                cluster = Cluster(home, setup, run, self.plan(setup), list(faults))
                outcome = cluster.run()
        finally:
            root.removeHandler(handler)
        if is_checked:
            outcome.errors += checks.faults_of_end(
                setup,
                outcome,
                cluster.tally,
                run / "checkpoints",
                self._undisturbed.get(setup.num_workers),
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
    """A run in another process."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid, self._pipe = pid, pipe

    def result(self) -> Result:
        with os.fdopen(self._pipe, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if not content:
            raise AssertionError(f"the simulation itself failed: status {status}")
        result: Any = pickle.loads(content)
        assert isinstance(result, Result)
        return result

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._pipe)
