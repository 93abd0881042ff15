"""A simulated cluster: `ps-server` and `ps-worker train` as processes of a world, under a launcher's rules.

The processes are the real ones from their settings on: `Server` over an engine, an update log and handlers;
`train_job` with a store opened as by the command. The launcher's `Supervisor` decides what follows when one
ends. What is not real: gRPC (network.py), disks (disk.py), threads and clocks (world.py), a step's work.
"""

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from ctr_ps.deploy import supervisor
from ctr_ps.deploy.supervisor import Decision, End, Exited, Policy, Restart, Supervisor, Warn
from ctr_ps.protos.errors import CtrPsError, LogError, PlaceLostError
from ctr_ps.protos.placement import NO_SERVER, ShardMap
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.checkpoint import publish, reader
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.engine.engine import Engine, EngineSettings
from ctr_ps.ps_server.parameters import Parameters
from ctr_ps.ps_server.rpc.moves import _HELD, Moves
from ctr_ps.ps_server.rpc.recovery import Progress
from ctr_ps.ps_server.rpc.server import ALL_LEFT, Server
from ctr_ps.ps_server.settings import LogSync, ServerSettings
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_worker.checkpoints import claim
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.cluster.joined_worker import JoinedWorker
from ctr_ps.ps_worker.cluster.open_store import open_store
from ctr_ps.ps_worker.communicators import asynchronous
from ctr_ps.ps_worker.extras.moves.move import Move, connected, states_of, weights_of
from ctr_ps.ps_worker.extras.moves.plan import with_another, with_server, without_server
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.run.membership import job_ends_by_errors
from ctr_ps.ps_worker.run.plan import Plan, plan_of
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from ctr_ps.ps_worker.training import step_loop
from tests.simulation.counters import NUM_SHARDS, Client, Tally
from tests.simulation.disk import Disk, Disks
from tests.simulation.network import CallFault, Network
from tests.simulation.world import Loop, Process, World, _now

LEASE_S = 3.0
RESTART_S = (0.3, 3.0)  # from the end of a process to the start of the next
STEP_S = (0.05, 2.0)  # the work of a batch

COUNTERS = "counters"  # a mode of its own: nothing is trained
KILL, PAUSE, CUT, POWER, DISK, TWIN = "kill", "pause", "cut", "power", "disk", "twin"
LEAVE = "leave"
LATE_S = (0.5, 20.0)  # until a worker starts without which the job does
LEFT = 128 + signal.SIGTERM
TORN, WIPE = "power fails in sync of", "wipe"
MOVE = "move"  # by process `who`: `other` is "add", "drain" or "replace"
AT_SYNCS = (DISK, TORN)
NAMES = "names"  # as `other` of TORN: so many `seconds` syncs after the sync of the folder of number `at`


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a process at a time; a cut is of its link to `other`."""

    # KILL, PAUSE, CUT, POWER, DISK, TORN; TWIN: a second process is started as this one; WIPE: killed, and
    # started on an empty disk; LEAVE: it is told to end
    kind: str
    at: float  # seconds since the beginning; of AT_SYNCS, the number of the sync
    who: str
    other: str = ""
    seconds: float = 0.0  # how long it lasts

    def __str__(self) -> str:
        other = f" from {self.other}" if self.other else ""
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {self.who}{other} at {self.at:.3f}{lasts}"


OF_QUEUE = ("data.deal=queue", "life.statistics=true", "life.shrink_every_epochs=0")
"""Rows then count how often they were trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a seed simulates, without its faults."""

    mode: str = "sync"
    num_servers: int = 2
    num_workers: int = 2
    num_spares: int = 0
    num_at_start: int | None = None  # the others come later; they share a queue of files
    continues: bool = False  # without lost workers
    log_sync: LogSync = LogSync.OS
    settings: tuple[str, ...] = ()  # of the job file
    rows: int = 240
    epochs: int = 1
    step_s: tuple[float, float] = STEP_S
    apply_s: float = 0.0  # at most, before, while and after a push changes the parameters
    snapshot_s: float = 0.0  # at most, before a snapshot is taken
    replay_s: float = 0.0  # at most, of each call that a recovery carries out
    wait_limit_s: float = 200.0
    pace_s: float = 1.0  # at most, between pushes of counting clients
    late_s: float = 0.0  # at most, before a worker comes to a barrier
    threads: int = 1  # of a worker
    has_log: bool = True  # of updates; without one no process may die
    in_threads: bool = False  # servers carry out all calls in threads, not only large ones
    limit_s: float = 3000.0

    def job(self, folder: Path) -> Job:
        settings = [
            f"strategy.mode={'sync' if self.mode == COUNTERS else self.mode}",
            "model.name=lr",
            "train.batch_size=10",
            f"train.thread_num={self.threads}",
            f"train.epochs={self.epochs}",
            f"data.train={folder / 'data'}/train-*",
            f"data.schema={folder / 'data' / 'schema.toml'}",
            "data.format=criteo",
            f"cluster.on_worker_loss={'continue' if self.continues else 'wait'}",
            f"cluster.lease_s={LEASE_S}",
            f"cluster.wait_timeout_s={self.wait_limit_s}",
            "cluster.stream=false",
            "checkpoint.dir=checkpoints",
            *(() if self.num_at_start is None else OF_QUEUE),
            *self.settings,
        ]
        return override_job({}, settings, source="simulation")


def write_data(folder: Path, rows: int) -> None:
    """Writes the rows that all simulated jobs train on: two files, of numbers and values by chance.

    They are of unlike lengths, so that one of two workers has one step more.
    """
    random = np.random.default_rng(7)
    (folder / "data").mkdir()
    (folder / "data" / "schema.toml").write_text(
        'hash_version = 1\ndense = [{ name = "I1" }]\nslots = ["C1", "C2"]\n'
    )
    for part in range(2):
        lines = [
            f"{random.integers(2)}\t{random.integers(9)}\t{random.integers(40)}\t{random.integers(9)}\n"
            for _ in range(rows // 2 + (1 - 2 * part) * rows // 48)
        ]
        (folder / "data" / f"train-{part}").write_text("".join(lines))


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    code: int = -1
    is_left_by_all: bool = False  # a server has seen the end of the job
    is_wiped: bool = False  # a server has lost its disk: no job may go on as if it had not
    is_claimed: bool = False  # by a process that was lost, and lives
    reason: str = ""
    summaries: dict[str, Summary] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    num_calls: int = 0
    num_switches: int = 0
    digest: int = 0
    steps: list[tuple[float, CallFault]] = field(default_factory=list)  # of a move, and when


class Cluster:
    """The processes of one job."""

    def __init__(
        self, home: World, setup: Setup, folder: Path, plan: Plan, faults: list[Fault | CallFault]
    ) -> None:
        self.world, self.setup, self.folder = home, setup, folder
        of_calls = [each for each in faults if isinstance(each, CallFault)]
        self.network = Network(home, of_calls, LEASE_S)
        self._loses_power = any(
            f.loses_power if isinstance(f, CallFault) else f.kind in (POWER, TORN) for f in faults
        )
        self.disks = Disks(home, lose_power=self._loses_power)
        home.network, home.disks = self.network, self.disks
        home.setup = setup
        self._plan = plan
        self.tally = Tally()
        self.servers = [f"server.{index}" for index in range(setup.num_servers + setup.num_spares)]
        listed = self.servers[: setup.num_servers]
        self.workers = [f"worker.{index}" for index in range(setup.num_workers)]
        self._disk_of: dict[str, Disk] = {
            name: self.disks.add(folder / name) for name in self.servers
        }
        self.endpoints = tuple(f"{name}:1" for name in listed)
        self.engines: dict[Process, Engine] = {}
        self._maps: dict[int, ShardMap] = {}  # by epoch
        self._has_map: dict[Process, ShardMap] = {}  # that was compared last
        self.network.on_answer = self._require_one_map
        self._moves: dict[str, str] = {}  # what a driver does
        self._unused = self.servers[setup.num_servers :]
        self.running: dict[str, Process] = {}
        self.outcome = Outcome()
        self._supervisor = Supervisor(
            listed,
            self.workers,
            Policy(
                # After a loss of a disk nothing helps.
                max_restarts=60 if any(f.kind == WIPE for f in faults) else 1000,
                durability="log",
                lease_seconds=LEASE_S,
                continues=setup.continues,
            ),
            self._unused.copy(),
        )
        self._twins: dict[str, list[Process]] = {}  # processes of one name that run at once
        self._faults = faults
        self._successors: set[Process] = set()  # twins of processes that have ended
        self._told: set[Process] = set()  # to end
        self._done: set[str] = set()  # names of which one has come to its end
        self.network.kill = self._kill
        self.network.replace = self._replace
        for fault in faults:
            if isinstance(fault, Fault):
                self._prepare(fault)

    # From the start to the end

    def run(self) -> Outcome:
        num_late = 0
        if self.setup.num_at_start is not None:
            num_late = self.setup.num_workers - self.setup.num_at_start
        for name in (*self.servers, *self.workers[: len(self.workers) - num_late]):
            self._start(name)
        for name in self.workers[len(self.workers) - num_late :]:
            self.world.at(self.world.random.uniform(*LATE_S), partial(self._start, name))
        self._look_later()
        outcome = self.outcome
        try:
            self.world.run(self.setup.limit_s)
        except AssertionError as error:
            outcome.errors.append(str(error))
        for process in self.world.processes:
            if process.is_alive:
                self.network.has_ended(process)
        outcome.errors += self.network.wrong
        outcome.virtual_s, outcome.digest = self.world.now, self.world.digest
        outcome.num_calls, outcome.num_switches = self.network.num_calls, self.world.num_switches
        return outcome

    def _start(self, name: str, *, is_twin: bool = False) -> None:
        if self._comes_too_late(name):
            self._decide(Exited(name, 0))
            return
        process = self.world.process(name)
        if is_twin:
            twins = self._twins.setdefault(name, [])
            twins += [each for each in (self.running[name], process) if each not in twins]
        else:
            self.running[name] = process
        kind, _, index = name.partition(".")
        main = {"server": self._serve, "worker": self._train, "driver": self._move}[kind]
        self.world.tell(process, "starts")
        process.start(partial(self._main, process, partial(main, process, int(index))), "main")

    def _comes_too_late(self, name: str) -> bool:
        """Whether a worker starts in an elastic job that is over."""
        is_elastic = self.setup.num_at_start is not None
        return is_elastic and name in self.workers[1:] and "worker.0" in self.outcome.summaries

    def _main(self, process: Process, run: Callable[[], int]) -> None:
        try:
            code = run()
        except SystemExit as error:
            code = int(error.code or 0)
        except CtrPsError as error:
            code = error.exit_code
            # Before the first barrier the claim of a process that lives, but was lost, is taken for that of
            # another run: docs/decisions/0064.
            self.outcome.is_claimed |= "is in use by another live run" in str(error)
            self.world.tell(process, f"error: {type(error).__name__}: {error}")
        except Exception as error:
            code = 1
            logging.getLogger("simulation").exception("unforeseen")
            self.outcome.errors.append(f"{process} raised {error!r}")
        self._ended(process, code)

    def _ended(self, process: Process, code: int) -> None:
        if process.is_alive:
            process.kill()
            self.network.has_ended(process)
            self.world.tell(process, f"ended with code {code}")
            if process.name.startswith("driver"):
                return
            if self._goes_on(process, is_done=code == 0):
                return
            # Refused, but the other is dead: the launcher starts that again.
            if code and process in self._successors:
                code = -signal.SIGKILL
            # It comes back; or it came when the job was over.
            if code == LEFT:
                code = -signal.SIGKILL
            elif self._comes_too_late(process.name):
                code = 0
            # Its disk has failed: somebody mends it, and starts the server again.
            if code == LogError.exit_code and self._disk_of[process.name].has_failed:
                is_needed = len(self.outcome.summaries) < self.setup.num_workers
                code = -signal.SIGKILL if is_needed else 0
            self._decide(Exited(process.name, code))

    def _goes_on(self, process: Process, *, is_done: bool) -> bool:
        """Whether the launcher need not hear of an end, as another process of the name does the work.

        One that was silent for its lease may have lost its place to its twin: either may come to the end.
        """
        twins = self._twins.get(process.name, [])
        if process not in twins:
            return process.name in self._done
        twins.remove(process)
        if is_done:
            self._done.add(process.name)
            twins.clear()
            return False
        if twins:
            self.running[process.name] = twins[0]
            self._successors.add(twins[0])
        return bool(twins)

    def _decide(self, event: Exited | None) -> None:
        is_elastic = self.setup.num_at_start is not None
        if is_elastic and event and event.returncode and event.name in self.workers[1:]:
            # Somebody starts another, in its place.
            self.world.at(self.world.random.uniform(*RESTART_S), partial(self._start, event.name))
            return
        decision: Decision | None = self._supervisor.handle(event, self.world.now)
        match decision:
            case Restart(name=name):
                self.world.at(self.world.random.uniform(*RESTART_S), partial(self._start, name))
            case Warn(text=text):
                self.world.tell("launcher", text)
            case End(code=code, reason=reason):
                self.world.tell("launcher", f"the end: code {code} {reason}")
                self.outcome.code, self.outcome.reason = code, reason
                self.world.is_over = True
            case None:
                pass
            case other:
                self.outcome.errors.append(f"unforeseen: {other}")
                self.world.is_over = True

    def _look_later(self) -> None:
        if self.world.now >= self._supervisor.next_time():
            self._decide(None)
        self.world.at(0.5, self._look_later)

    # Processes

    def _serve(self, process: Process, index: int) -> int:
        engine = Engine(
            EngineSettings(
                num_workers=self.setup.num_workers,
                num_at_start=self.setup.num_at_start,
                server_index=index if index < self.setup.num_servers else NO_SERVER,
                num_servers=self.setup.num_servers if index < self.setup.num_servers else 1,
                endpoints=self.endpoints
                if index < self.setup.num_servers
                else (f"{process.name}:1",),
                wait_limit_s=self.setup.wait_limit_s,
                clock=time.time,
                monotonic=time.monotonic,
                has_update_log=self.setup.has_log,
            )
        )
        self.engines[process] = engine
        settings = ServerSettings(
            idle_limit_s=0.0,
            stream_port=None,
            update_log=str(self._disk_of[process.name].folder) if self.setup.has_log else None,
            log_sync=self.setup.log_sync,
            wait_limit_s=self.setup.wait_limit_s,
            linger_s=5.0,
        )

        async def serve() -> str:
            server = Server(
                engine, settings, address=f"{process.name}:1", credentials=Credentials()
            )
            return await server.run(lambda _: self.world.tell(process, "serves"))

        reason = Loop.run(serve())
        self.outcome.is_left_by_all |= reason == ALL_LEFT
        self.world.tell(process, f"ended: {reason}")
        return 0

    def _train(self, process: Process, index: int) -> int:
        role = WorkerRole(
            endpoints=self.endpoints,
            worker_index=index,
            num_workers=self.setup.num_workers,
            num_at_start=self.setup.num_at_start,
        )
        if self.setup.mode == COUNTERS:
            client = Client(process, role, self.tally, self.setup, may_fall=self._loses_power)
            client.run(LEASE_S)
            self.outcome.summaries[process.name] = Summary()
            return 0
        with job_ends_by_errors(role):
            plan = plan_with(self._plan, role)
        with open_store(role, plan.job.cluster) as store:
            summary = train_job(plan, store, is_told_to_end=lambda: process in self._told)
        self.outcome.summaries[process.name] = summary
        self.world.tell(process, f"trained examples={summary.examples}")
        return 0

    def _require_one_map(self, process: Process) -> None:
        """All servers that answer have the same map in an epoch, so each shard has one owner."""
        if (engine := self.engines.get(process)) is None or engine.shard_map.epoch == 1:
            return
        shard_map = engine.shard_map
        if self._has_map.get(process) is shard_map:
            return
        self._has_map[process] = shard_map
        if self._maps.setdefault(shard_map.epoch, shard_map) != shard_map:
            self.outcome.errors.append(f"{process} has another map of epoch {shard_map.epoch}")

    def _move(self, process: Process, _: int) -> int:
        """A driver moves shards, if there is something to move; it may fail, and leaves no trace then."""
        kind, chance = self._moves[process.name], Random(str(process))
        transport = GrpcTransport(self.endpoints, stream=False, retry_s=10.0)
        try:
            before = connected(transport)
            states = states_of(transport)
            weights = weights_of(states)
            others = before.servers[1:]
            if kind != "drain" and not self._unused:
                return 0
            if kind == "drain" and others:
                after = without_server(before, chance.choice(others), weights)
            elif kind == "replace" and others:
                after = with_another(before, chance.choice(others), f"{self._unused.pop(0)}:1")
            elif kind == "add":
                after = with_server(before, f"{self._unused.pop(0)}:1", weights)
            else:
                return 0
            Move(transport, states, after).run()
            self.world.tell("driver", f"moved to epoch {after.epoch}")
        finally:
            transport.close()
        return 0

    # Faults

    def _prepare(self, fault: Fault) -> None:
        if fault.kind in AT_SYNCS:
            disk, number = self._disk_of[fault.who], int(fault.at)
            if fault.kind == DISK:
                disk.fails_at.add(number)
            elif fault.other == NAMES:
                disk.dies_after[number] = int(fault.seconds), partial(self._happen, fault)
            else:
                disk.dies_at[number] = partial(self._happen, fault)
            return
        self.world.at(fault.at, partial(self._happen, fault))

    def _happen(self, fault: Fault) -> None:
        process = self.running.get(fault.who)
        if fault.kind == MOVE:
            if process is None and not self.world.is_over:
                self.world.tell("fault", str(fault))
                self._moves[fault.who] = fault.other
                self._start(fault.who)
            return
        if fault.kind == CUT:
            self.world.tell("fault", str(fault))
            self.network.cut(fault.who, fault.other)
            self.world.at(fault.seconds, partial(self.network.heal, fault.who, fault.other))
            return
        if process is None or not process.is_alive:
            return
        self.world.tell("fault", str(fault))
        if fault.kind == LEAVE:
            self._told.add(process)
            return
        if fault.kind == TWIN:
            self._start(fault.who, is_twin=True)
            return
        if fault.kind == PAUSE:
            process.pause()
            self.world.at(fault.seconds, process.resume)
            return
        if fault.kind == WIPE:
            self.outcome.is_wiped = True
            self.network.forget(fault.who)
            self._disk_of[fault.who].wipe()
        self._kill(process, fault.kind in (POWER, TORN))

    def _replace(self, process: Process, seconds: float) -> None:
        """A process is paused, and another is started as it; but not as a driver."""
        if process.is_alive and process is self.running.get(process.name):
            process.pause()
            self.world.at(seconds, process.resume)
            if not process.name.startswith("driver"):  # that nobody starts again
                self._start(process.name, is_twin=True)

    def _kill(self, process: Process, loses_power: bool = False) -> None:
        if not process.is_alive:
            return
        process.kill()
        self.world.tell(process, "is killed")
        if process.name.startswith("driver"):
            return
        if self._goes_on(process, is_done=False):
            return
        if loses_power:
            self.network.forget_pushes(process.name)
            lost = self._disk_of[process.name].lose_power(self.world.random)
            self.world.tell("disk", f"{process.name} {lost}")
        self._decide(Exited(process.name, -signal.SIGKILL))


def plan_with(plan: Plan, role: WorkerRole) -> Plan:
    """Returns the plan of the same job in another role."""
    from ctr_ps.ps_worker.job.model import trained_model

    trained = trained_model(plan.job, plan.model, worker=role.worker_index)
    return replace(plan, role=role, trained=trained, terms={**plan.terms, **role.members.terms})


def prepared(setup: Setup, folder: Path) -> Plan:
    """Returns the plan of a setup's job, whose data is in the folder."""
    plan = plan_of(setup.job(folder))
    tables = [replace(each, num_shards=NUM_SHARDS) for each in plan.specs.tables]
    return replace(plan, specs=replace(plan.specs, tables=tables))


class TraceHandler(logging.Handler):
    """Writes what processes log into the trace of their world."""

    def emit(self, record: logging.LogRecord) -> None:
        home = _now[0]
        if home is None or home.current is None:
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" [{self.formatException(record)}]"
        home.tell(home.current.process, _steady(text))

    @staticmethod
    def formatException(record: logging.LogRecord) -> str:  # noqa: N802 - as logging's
        import traceback

        assert record.exc_info is not None
        return "".join(traceback.format_exception(*record.exc_info))


def _steady(text: str) -> str:
    """Leaves out what real time gives."""
    return re.sub(r"(seconds|pause_ms|calls/s|examples_per_s)=[\d.]+", r"\1=.", text)


def install() -> None:
    """Lets work take time, and a process die as often as a seed wants it."""
    supervisor.MAX_FUTILE_RESTARTS = 1000
    # Of the few batches that there are.
    asynchronous.FIRST_BATCHES, asynchronous.BATCHES_IN_STEP = 4, 8
    # It would look at all libraries of this process, for each thread.
    step_loop.threadpool_limits = lambda **_: nullcontext()
    _in_two(SparseTable)
    _takes_time(step_loop._Thread, "compute", before=lambda setup: setup.step_s)
    _takes_time(Engine, "push", before=lambda setup: (0.0, setup.apply_s), stalls=0.5)
    _takes_time(Parameters, "apply", after=lambda setup: (0.0, setup.apply_s), stalls=1.0)
    _takes_time(Parameters, "prepare_snapshot", after=lambda setup: (0.0, setup.snapshot_s))
    _takes_time(Progress, "step", before=lambda setup: (0.0, setup.replay_s))
    for name in ("barrier", "all_reduce"):
        _takes_time(JoinedWorker, name, before=lambda setup: (0.0, setup.late_s))
    _notes_refusals(Engine)
    _notes_deadlocks(Moves)
    claim._state_and_start = _state_and_start
    claim._has_pid = lambda pid: bool(_state_and_start(pid)[0])
    write_name = publish._write_name

    def write_name_checked(*args: Any) -> None:
        home = _now[0]
        if home is not None and home.current is not None:
            home.network.publishes(home.current.process)
        write_name(*args)

    publish._write_name = write_name_checked
    _parses_once()


def _parses_once() -> None:
    """Has a manifest parsed and checked once, as all processes share this one, and files read whole."""
    publish.manifest_from_json = lru_cache(maxsize=None)(publish.manifest_from_json)
    require_whole, whole = reader.require_whole, {}

    def require_whole_once(manifest: Any, source: str) -> None:
        if id(manifest) not in whole:
            require_whole(manifest, source)
            whole[id(manifest)] = manifest  # so that no other has its address

    reader.require_whole = require_whole_once
    open_file = LocalFolder.open

    @contextmanager
    def open_small(self: LocalFolder, file: str) -> Iterator[Any]:
        try:
            content = (self.path / file).read_bytes()
        except OSError:
            with open_file(self, file) as source:
                yield source
        else:
            yield pa.BufferReader(content)

    LocalFolder.open = open_small


def _state_and_start(pid: int) -> tuple[str, str]:
    """As that of claim.py, for processes of the world: those of one name share a machine."""
    home = _now[0]
    assert home is not None
    found = [each for each in home.processes if each.pid == pid and each.is_alive]
    return ("T" if found[0].is_paused else "S", str(pid)) if found else ("", "")


Range = Callable[[Setup], tuple[float, float]]


def _nothing(_: Setup) -> tuple[float, float]:
    return 0.0, 0.0


def _pass_time(of: Range, what: str, *, stalls: float = 0.0) -> None:
    """Lets time of a range pass, and what the process is to stall, with the chance that it does so here."""
    home = _now[0]
    if home is None or home.current is None:
        return
    low, high = of(home.setup)
    stalled_s = home.current.process.stalls
    if stalls and stalled_s and home.random.random() < stalls:
        low = high = stalled_s.pop()
    if high:
        home.block(home.random.uniform(low, high), what)


def _takes_time(
    owner: type,
    name: str,
    *,
    before: Range = _nothing,
    after: Range = _nothing,
    stalls: float = 0.0,
) -> None:
    method, what = getattr(owner, name), f"{owner.__name__}.{name}"

    def slow(*args: Any, **kwargs: Any) -> Any:
        if before is not _nothing:
            _pass_time(before, what, stalls=stalls)
        result = method(*args, **kwargs)
        if after is not _nothing:
            _pass_time(after, what, stalls=stalls)
        return result

    setattr(owner, name, slow)


def _in_two(table: Any) -> None:
    """Has a push change a table in two parts, as shards are changed one after another."""
    push = table.push

    def push_in_two(self: Any, grad: Any, *args: Any, **kwargs: Any) -> None:
        home, half = _now[0], grad.keys.size // 2
        if home is None or home.current is None or not home.setup.apply_s or not half:
            push(self, grad, *args, **kwargs)
            return
        for part in (slice(None, half), slice(half, None)):
            push(self, grad.stretch(part), *args, **kwargs)
            if part.start is None:
                _pass_time(lambda setup: (0.0, setup.apply_s), "half of a push")

    table.push = push_in_two


def _notes_refusals(engine: Any) -> None:
    """Has the network hear of pushes that servers carry out, and of those of processes without a place."""
    push = engine.push

    def push_noted(self: Any, gradients: Any, push_id: Any, *args: Any, **kwargs: Any) -> Any:
        home = _now[0]
        if home is None or home.current is None:
            return push(self, gradients, push_id, *args, **kwargs)
        server = home.current.process
        try:
            answer = push(self, gradients, push_id, *args, **kwargs)
        except PlaceLostError:
            home.network.pushed(server, push_id, is_refused=True)
            raise
        home.network.pushed(server, push_id, is_refused=False)
        return answer

    engine.push = push_noted


def _notes_deadlocks(moves: Any) -> None:
    """Has the network hear of calls that wait for the end of a move, while it waits for theirs."""
    overdue = moves.overdue

    def overdue_noted(self: Any) -> Any:
        end, home = overdue(self), _now[0]
        assert home is not None
        assert home.current is not None
        is_held = end is not None and self._move.phase is not None
        entered = [name for name in _HELD if is_held and self._entering[name]]
        home.network.wrong += [
            f"{home.current.process} ended a move for a {name}" for name in entered
        ]
        return end

    moves.overdue = overdue_noted
