"""The engine of a server: what happens comes in, what is decided and answered goes out.

    call or tick --> journal: written first --> coordinator: decided under its lock --> answered
                                                     `--> applier: parameters changed, then counted

The server is a state machine. Its ground state is a checkpoint, its history the update log; its inputs are
the methods here, in the order in which the journal has them. Time comes in as `pass_time` and as two clocks,
the disk as a journal and as folders of checkpoints, so any number of engines can run in one process.
`ps_server.store.ParameterStore` is the in-process `Store` over an engine, `ps_server.rpc` the shell over
gRPC.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ctr_ps.protos.chunking import PushChunk, join_push
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import (
    Acknowledged,
    Future,
    InferenceSettings,
    Member,
    ModelState,
    PushId,
    StateChunk,
    StoreStatus,
    Version,
)
from ctr_ps.protos.store.state_transfer import join_state
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.reader import Roots
from ctr_ps.ps_server.checkpoint.writer import (
    check_folder,
    shared_folder,
    write_inference_share,
    write_share,
)
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.coordination.job_state import JobState, WaitingPart
from ctr_ps.ps_server.coordination.mailbox import INBOX_BYTES
from ctr_ps.ps_server.engine.applier import Applier
from ctr_ps.ps_server.engine.journal import (
    BACK,
    BACK_JSON,
    LOST,
    LOST_JSON,
    NEW_JOB,
    NO_JOURNAL,
    EngineState,
    Journal,
    Owner,
)
from ctr_ps.ps_server.engine.pulls import Pulls
from ctr_ps.ps_server.parameters import Parameters
from ctr_ps.ps_server.settings import DEFAULT_WAIT_LIMIT_S
from ctr_ps.ps_server.snapshot.snapshots import Snapshots
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.rows.statistics import Clock, wall_clock


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine`."""

    num_workers: int = 1  # workers of the job
    num_heter: int = 0  # its heter trainers, numbered behind the workers
    num_at_start: int | None = None  # workers without whom it does not start; None: all
    server_index: int = 0  # which of the servers this is
    num_servers: int = 1  # 1 holds everything
    endpoints: Sequence[str] = ()  # of the servers; none: no move can begin
    wait_limit_s: float = DEFAULT_WAIT_LIMIT_S  # how long a call waits for other workers
    inbox_bytes: int = INBOX_BYTES  # limit of the messages that wait for one worker
    memory_limit: int | None = None  # bytes of tables from which on pushes may not create rows
    checkpoint_roots: Sequence[str] = ()  # the only folders to save and load in; none: anywhere
    clock: Clock = wall_clock  # the time at which rows are seen
    monotonic: Callable[[], float] = time.monotonic  # the clock for saves, in seconds
    has_update_log: bool = False  # a process after this one can go on where it was


class Engine:
    """Tables, dense blocks and coordination of one process. Thread-safe."""

    def __init__(self, settings: EngineSettings) -> None:
        """Makes an empty engine."""
        self._settings = settings
        # which server of which job this is
        self.owner = Owner(
            server_index=settings.server_index,
            num_servers=settings.num_servers,
            num_workers=settings.num_workers,
            num_heter=settings.num_heter,
            num_at_start=settings.num_at_start,
        )
        self.shard_map = ShardMap.of(settings.num_servers, settings.endpoints)
        # a move is under way: what a segment that began now would need is in the one before
        self.moves_shards = False
        self.last_move = ""  # token of the move that has led to the map; empty: none
        # workers of a job, and its heter trainers
        self.members = Members(settings.num_workers, settings.num_heter, settings.num_at_start)
        self.parameters = Parameters(
            num_workers=self.members.total,
            server_index=settings.server_index,
            shard_map=self.shard_map,
            memory_limit=settings.memory_limit,
            clock=settings.clock,
        )
        # keeps saves and changes of the parameters apart
        self.snapshots = Snapshots(wait_limit_s=settings.wait_limit_s, monotonic=settings.monotonic)
        self.applier = Applier(self.members, self.parameters, self.snapshots)
        self.pulls = Pulls(self.parameters, self.applier)
        # Held around joins, signs of life and losses, which decide who has the place of a worker, and around
        # their records, so that the journal has these in the order in which they happen. So are those of the
        # queue of files. Other departures do not hold it: the worker makes them after its other calls.
        self.places = threading.Lock()
        self._calling: Counter[int] = Counter()  # calls that are carried out, by worker
        self.journal: Journal = NO_JOURNAL
        self._roots = Roots(settings.checkpoint_roots)
        self._on_shard: Callable[[], None] = lambda: None  # of a recovery
        self._on_failure: Callable[[str], None] = lambda _: None
        self._begin_job(0)

    @property
    def keeps_log(self) -> bool:
        """Whether what happens is written, so that a process after this one can carry it out again."""
        return self.journal is not NO_JOURNAL

    # Jobs and recovery

    def begin_job(self) -> None:
        """Keeps the parameters, and forgets the workers of the last job and what was seen of them."""
        with self.journal.written(NEW_JOB, b""):
            self._begin_job(self.jobs_before + 1)

    def _begin_job(self, jobs_before: int) -> None:
        self.jobs_before = jobs_before  # jobs that were served before this one
        self.job = Coordinator(  # of the present job
            self.members,
            wait_limit_s=self._settings.wait_limit_s,
            inbox_bytes=self._settings.inbox_bytes,
            on_failure=self._on_failure,
            jobs_before=jobs_before,
            has_update_log=self._settings.has_update_log,
        )
        self.parameters.reset_subscribers()

    def place(
        self, shard_map: ShardMap, server_index: int, blocks: Mapping[str, DenseTable] | None = None
    ) -> None:
        """Is this server of a map from now on; see `Parameters.place`."""
        # First: what is read of other parameters than the caller's map says is refused after it was read.
        self.shard_map = shard_map
        self.owner = replace(
            self.owner, server_index=server_index, num_servers=shard_map.num_servers
        )
        if self.applier.before_step is not None:
            # All servers have all parts of the last step: one that is repeated counts nowhere.
            self.applier.before_step = replace(self.applier.before_step, rows={}, blocks={})
        self.parameters.place(shard_map, server_index, blocks)

    def call_on_failure(self, on_failure: Callable[[str], None]) -> None:
        """Has `on_failure` called, from any thread, with the reason when a job ends before its time."""
        # The job has it, and not a method of this: it would hold its engine, and the tables, in a circle.
        self._on_failure = self.job.on_failure = on_failure

    def state(self) -> EngineState:
        """Returns what `restore` and the calls that wait make of an engine with the same parameters.

        To be called while nothing changes them.
        """
        tables, blocks = self.parameters.declared()
        return EngineState(
            owner=self.owner,
            shard_map=self.shard_map,
            last_move=self.last_move,
            jobs_before=self.jobs_before,
            job=self.job.state(),
            waiting=self.job.waiting(),
            tables=tables,
            blocks=blocks,
        )

    def restore(self, jobs_before: int, state: JobState) -> None:
        """Takes over the state of a server before this one, whose parameters it has."""
        self._begin_job(jobs_before)
        self.job.restore(state)

    def hold_part(self, part: WaitingPart) -> None:
        """Takes over a part of a step that waited, after `restore`; applies the step if it is complete."""
        self.job.pushes.hold_part(part)
        self.apply_complete_steps()

    @contextmanager
    def recovering(self, on_shard: Callable[[], None]) -> Iterator[None]:
        """Each step is applied by the call that completes it, and loads call `on_shard`, within the block."""
        before, self._on_shard = self._on_shard, on_shard
        try:
            with self.applier.inline():
                yield
        finally:
            self._on_shard = before

    # Who takes part

    @contextmanager
    def calling(self, member: Member, acknowledged: Acknowledged | None = None) -> Iterator[None]:
        """Held while a call of a process is carried out, which is a sign of life; see `Coordinator.admit`.

        The process is not lost meanwhile. Else a call that the journal has might be refused, since another
        process took the place after it was written, and be carried out when the journal is replayed.
        """
        with self.places:
            if not self.job.admit(member, acknowledged):
                with self.journal.written(BACK, BACK_JSON.dump_json(member)):
                    self.job.bring_back(member)
                self.job.admit(member, acknowledged)
            self._calling[member.worker] += 1
        try:
            yield
        finally:
            with self.places:
                self._calling[member.worker] -= 1

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        """See `protos.store.Store`; a call of a member is enough, unless it is the last."""
        self.job.require_no_failure()
        if is_last:
            self.job.end_lease(worker)

    def pass_time(self, seconds: float) -> None:
        """Time passes, by which workers may be lost of which nothing is heard."""
        with self.places:
            silent = self.job.pass_time(seconds)
            if lost := [worker for worker in silent if not self._calling[worker]]:
                with self.journal.written(LOST, LOST_JSON.dump_json(lost)):
                    self.lose(lost)

    def lose(self, workers: Sequence[int]) -> None:
        """Workers are lost: by the rule of the job it ends, or they leave, or others take their places."""
        self.job.lose(workers)
        self.apply_complete_steps()

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        job = self.job
        job.leave(worker, step=step)
        self.apply_complete_steps(by_caller=True)
        if not job.failure:
            job.pushes.when_applied().result()

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """See `protos.store.Store`."""
        self.job.abort(worker, reason, comes_again=comes_again)

    # Pushes

    def push_chunk(
        self, chunk: PushChunk | StateChunk, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """Takes a chunk of a push; the last to come pushes, the others are answered at once.

        Raises:
            ProtocolError: If it contradicts other chunks of the push, or comes too late; else as `push_grad`
                or `push_state` of `protos.store.Store`.
        """
        job = self.job
        taken = job.pushes.take(chunk, push_id, at)
        if not isinstance(taken, list):
            return taken
        try:
            if states := [each for each in taken if isinstance(each, StateChunk)]:
                return self.push_state(join_state(states), push_id, job)
            parts = [each for each in taken if isinstance(each, PushChunk)]
            return self.push(join_push(parts), push_id, at, job)
        except Exception as error:
            if chunk.num_chunks > 1:
                job.pushes.refuse(push_id, error)
            raise

    def push(
        self,
        gradients: Gradients,
        push_id: PushId,
        at: Version | None,
        job: Coordinator | None = None,
    ) -> Future[Version]:
        """Takes all of a push, whose push id was checked: `push_grad` of `protos.store.Store`.

        `job` is the one that it is of; None: the present one.
        """
        parameters, job = self.parameters, job or self.job
        parameters.check(gradients)
        if at is None:
            return self.applier.apply_arrival(
                job,
                push_id,
                lambda: parameters.apply(
                    gradients,
                    push_id.worker,
                    step=job.pushes.batches,
                    draw=_draw_of(push_id),
                    staleness=max(0, job.pushes.version - push_id.pulled),
                ),
            )
        entered = job.pushes.enter_part(gradients, push_id, at)
        self.applier.apply_steps(job, entered.complete, entered.answers)
        return job.pushes.when_applied(entered.at)

    def push_state(
        self, state: ModelState, push_id: PushId, job: Coordinator | None = None
    ) -> Future[Version]:
        """Takes all of a push of state, whose push id was checked; `job` is as for `push`."""
        job = job or self.job
        self.parameters.check_state(state)
        return self.applier.apply_arrival(
            job, push_id, lambda: self.parameters.write_state(state, draw=_draw_of(push_id))
        )

    def apply_complete_steps(self, *, by_caller: bool = False) -> None:
        """Applies the steps that are complete since a worker left them: at a barrier, for good, or lost."""
        job = self.job
        self.applier.apply_steps(job, job.pushes.take_complete_step(), by_caller=by_caller)

    # Where workers wait for each other

    def wait_version(self, at: Version) -> Future[Version]:
        """See `protos.store.Store`; of this process's parameters."""
        pushes = self.job.pushes
        return pushes.at_version(at, lambda: pushes.version)

    # Checkpoints

    def check_folder(self, folder: str, token: str) -> None:
        """Checks that `save_share` could write into a folder; raises CheckpointError as that does."""
        self._roots.require([folder])
        check_folder(folder, token, self.owner.server_index)

    def snapshot(self, token: str, base: str = "") -> None:
        """Takes a snapshot of this process's parameters, for the `save_share` with the same token.

        That has to follow soon; after a minute, or when another snapshot is taken, this one is dropped.
        A segment of the update log begins with it. `base` is the token of the save on which that is based,
        as a delta; empty: it is a full one.

        Raises:
            CheckpointError: If memory is short.
            UnknownChangesError: If another save than the base was the last here.
            WaitTimeoutError: If another save, or calls under way, do not end in time.
            AbortedError: If the job has ended by an error: parameters may have a part of a step.
            LogError: If the segment cannot be written.
        """
        self.journal.prepare_segment()
        self.parameters.prepare_snapshot()
        with self.snapshots.taking(token) as taking:
            if taking is None:
                return
            with self.journal.alone():
                with taking.moment():
                    applied = self.job.applied()
                    taking.snapshot = self.parameters.take_snapshot(applied, base)
                    state = self.state() if self.keeps_log else None
                if state is not None and not self.moves_shards:
                    self.journal.begin_segment(token, state)

    def save_share(
        self, folder: str, token: str, inference: InferenceSettings | None = None
    ) -> Share:
        """Writes this process's shards and pieces into a folder, and returns the entries written.

        They are as of the snapshot of the same token, which ends with this; for `inference`, what that needs.

        Raises:
            CheckpointError: If the folder is not in the roots or not the one that holds the token, or cannot
                be written; for inference also if a table keeps no scores, or weights are too large for the
                dtype.
            ProtocolError: If there is no such snapshot.
        """
        with self.snapshots.writing(token, is_base=inference is None) as snapshot:
            self._roots.require([folder])
            shared = shared_folder(folder, token)
            where = (shared, self.owner.server_index, snapshot.tables, snapshot.blocks)
            applied = snapshot.applied
            if inference is not None:
                entries = write_inference_share(*where, inference)
            else:
                entries = write_share(
                    *where,
                    candidates=snapshot.candidates,
                    counters=snapshot.counters,
                    removed=snapshot.removed,
                )
                self.parameters.base = token
        return Share(
            entries=tuple(entries),
            version=applied.version,
            batches=applied.batches,
            workers=applied.workers if inference is None else {},
        )

    def load(
        self,
        url: str,
        *,
        only: Collection[str] = (),
        token: str = "",
        on_shard: Callable[[], None] | None = None,
    ) -> None:
        """Reads this process's shards and pieces: `load` of `protos.store.Store`.

        The caller holds `snapshots.between_saves`, unless it is starting. `on_shard` is called after each
        shard.
        """
        checkpoint = self._roots.open(url)
        checkpoint.require_token(token)
        self.parameters.load(checkpoint, only, self.snapshots.alone, on_shard or self._on_shard)

    def status(self) -> StoreStatus:
        """See `protos.store.Store`."""
        return self.job.status(self.parameters.table_status(), self.snapshots.last)


def _draw_of(push_id: PushId) -> int:
    """Returns the draw of a push that is applied on arrival: one that a recovery knows, in any order."""
    return ((push_id.worker << 48) + push_id.sequence) % 2**64
