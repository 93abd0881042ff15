"""All parameters that one process holds: one server's, or the whole model of a run in process.

    push --check--> coordinator --> parameters    on arrival, or once all parts of a step are there
    pull --wait for version--> parameters

A push is checked as a whole before any of it is applied. The coordinator decides what is applied next; the
store applies it, outside the coordinator's lock. coordination/coordinator.py has the invariants of both.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import numpy as np

from protos.chunking import PushChunk, join_push
from protos.errors import ProtocolError
from protos.futures import Answered
from protos.gradients import Gradients, Values
from protos.keys import Keys
from protos.placement import ShardMap
from protos.role import Members
from protos.spec import DenseSpec, TableSpec
from protos.store import (
    Acknowledged,
    Changed,
    Future,
    InferenceSettings,
    Joined,
    Lease,
    Member,
    Message,
    Missing,
    ModelState,
    Numbers,
    Pulled,
    PulledPieces,
    PushId,
    Reduced,
    ReduceOp,
    SaveRequest,
    Shrunk,
    StateChunk,
    StoreStatus,
    Stretch,
    Version,
    WorkerProgress,
    push_then_pull,
)
from protos.store.state_chunks import join_state
from ps_server.checkpoint.files.digest import model_digest
from ps_server.checkpoint.files.manifest import Share
from ps_server.checkpoint.inference import write_inference_share
from ps_server.checkpoint.publish import require_writable
from ps_server.checkpoint.roots import Roots
from ps_server.checkpoint.writer import (
    check_folder,
    open_base,
    save_checkpoint,
    shared_folder,
    write_share,
)
from ps_server.coordination.coordinator import Coordinator
from ps_server.coordination.job_state import JobState, Waiting, WaitingMessage
from ps_server.coordination.mailbox import INBOX_BYTES
from ps_server.coordination.steps import CompleteStep
from ps_server.parameters import Parameters
from ps_server.settings import DEFAULT_WAIT_LIMIT_S
from ps_server.snapshot.before_step import BeforeStep, require_values_at
from ps_server.snapshot.snapshots import Snapshots, StoreSnapshot
from ps_server.table.changes.subscribers import NOBODY
from ps_server.table.rows.statistics import Clock, wall_clock
from ps_server.table.sparse_table import SparseTable

logger = logging.getLogger(__name__)


class ParameterStore:
    """Tables, dense blocks and coordination of one process: a `protos.store.Store`. Thread-safe."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        num_heter: int = 0,
        server_index: int = 0,
        num_servers: int = 1,
        wait_limit_s: float = DEFAULT_WAIT_LIMIT_S,
        inbox_bytes: int = INBOX_BYTES,
        memory_limit: int | None = None,
        checkpoint_roots: Sequence[str] = (),
        clock: Clock = wall_clock,
        has_update_log: bool = False,
    ) -> None:
        """Makes an empty store.

        Args:
            num_workers: Workers of the job.
            num_heter: Its heter trainers, numbered behind the workers.
            server_index: Which server of the cluster this is.
            num_servers: Servers of the cluster; 1 holds everything.
            wait_limit_s: How long a pull, a barrier or a message waits for other workers, in seconds.
            inbox_bytes: Limit of the messages that wait for one worker.
            memory_limit: Bytes of tables from which on pushes may not create rows; None: no limit.
            checkpoint_roots: Folders in which alone it saves and loads; none: anywhere.
            clock: The time at which rows are seen.
            has_update_log: Its calls are logged, so that a process after this one can go on where it was.
        """
        self.server_index = server_index
        self.shard_map = ShardMap.of(num_servers)
        self.members = Members(num_workers, num_heter)
        self._wait_limit_s = wait_limit_s
        self._inbox_bytes = inbox_bytes
        self._roots = Roots(checkpoint_roots)
        self._parameters = Parameters(
            num_workers=self.members.total,
            server_index=server_index,
            shard_map=self.shard_map,
            memory_limit=memory_limit,
            clock=clock,
        )
        self._snapshots = Snapshots(wait_limit_s=wait_limit_s)
        self._before_step: BeforeStep | None = None
        self._step_executor: Executor | None = None
        self._on_shard: Callable[[], None] = lambda: None  # of a recovery
        self._inline_values = 0
        self._has_update_log = has_update_log
        self.jobs_before = -1
        self._on_failure: Callable[[str], None] = lambda _: None
        self.begin_job()

    def begin_job(self) -> None:
        """Keeps the parameters, and forgets the workers of the last job and what was seen of them."""
        self.jobs_before += 1
        self._coordinator = Coordinator(
            self.members,
            wait_limit_s=self._wait_limit_s,
            inbox_bytes=self._inbox_bytes,
            on_failure=self._on_failure,
            jobs_before=self.jobs_before,
            has_update_log=self._has_update_log,
        )
        self._parameters.reset_subscribers()

    def call_on_failure(self, on_failure: Callable[[str], None]) -> None:
        """Has `on_failure` called, from any thread, with the reason when a job ends before its time."""
        self._on_failure = on_failure
        self._coordinator.call_on_failure(on_failure)

    def apply_steps_in(self, executor: Executor, *, inline_values: int) -> None:
        """Applies complete synchronous steps of more than `inline_values` gradient values in an executor.

        Otherwise they are applied by the call that completes them, as for a store in process. `leave` always
        returns after the steps that it completes.
        """
        self._step_executor, self._inline_values = executor, inline_values

    # Recovery

    def job_state(self) -> JobState:
        """Returns what `restore` needs, besides what `waiting` returns, while nothing else is called."""
        return self._coordinator.state()

    def waiting(self) -> list[Waiting]:
        """Returns what is part of what this knows, and waits for others or is to be taken by them."""
        return self._coordinator.waiting()

    def declared(self) -> tuple[list[TableSpec], list[tuple[DenseSpec, Values | None]]]:
        """Returns all tables and dense blocks that were declared, these with the values that were given."""
        return self._parameters.declared()

    def restore(self, jobs_before: int, state: JobState) -> None:
        """Takes over the state of a server before this one, whose parameters it has."""
        self.jobs_before = jobs_before - 1
        self.begin_job()
        self._coordinator.restore(state)

    def hold(self, waiting: WaitingMessage) -> None:
        """Takes over a message that waited for its receiver, after `restore`."""
        self._coordinator.hold(waiting)

    @property
    def failure(self) -> str:
        """Why the job has ended before its time; empty: it has not."""
        return self._coordinator.failure

    @property
    def lacks_memory(self) -> bool:
        """Whether the job has failed since this process has no memory left."""
        return self._coordinator.lacks_memory

    @property
    def can_resume(self) -> bool:
        """Whether a job that has failed can go on from the servers' update logs."""
        return self._coordinator.can_resume

    @contextmanager
    def applying_inline(self, on_shard: Callable[[], None]) -> Iterator[None]:
        """Each step is applied by the call that completes it, and loads call `on_shard`, within the block."""
        before = self._step_executor, self._on_shard
        self._step_executor, self._on_shard = None, on_shard
        try:
            yield
        finally:
            self._step_executor, self._on_shard = before

    # Joining and declaring

    def join(
        self,
        worker: int,
        incarnation: int,
        *,
        terms: Mapping[str, str],
        lease: Lease | None = None,
        only_asks: bool = False,
    ) -> Future[Joined]:
        """See `protos.store.Store`; of this process alone. Who only asks is told when the place is free."""
        member = Member(worker, incarnation)
        return self._coordinator.join(member, terms, lease, only_asks=only_asks)

    def hear_of(self, member: Member) -> None:
        """A process gives a sign of life; raises ProtocolError unless it has its place in the job."""
        self._coordinator.hear_of(member)

    def require_place(self, member: Member) -> None:
        """Raises ProtocolError unless the process has its place in the job; it is no sign of life."""
        self._coordinator.require_place(member)

    def would_return(self, member: Member) -> bool:
        """Whether a sign of life of a process that has a place changes who may have it next."""
        return self._coordinator.would_return(member)

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        """See `protos.store.Store`; a call of a member is enough, unless it is the last."""
        self._coordinator.require_no_failure()
        if is_last:
            self._coordinator.end_lease(worker)

    def confirm_place(self, worker: int) -> None:
        """See `protos.store.Store`; no-op, since nobody else can have it."""

    def disconnect(self) -> None:
        """See `protos.store.Store`; no-op, since there is no connection."""

    def require_acknowledged(self, member: Member, acknowledged: Acknowledged) -> None:
        """Raises LostPushesError if pushes of a process are missing that were acknowledged."""
        self._coordinator.require_acknowledged(member, acknowledged)

    def pass_time(self, seconds: float) -> list[int]:
        """Time passes; returns the workers of which nothing was heard for so long that they are lost."""
        return self._coordinator.pass_time(seconds)

    def lose(self, workers: Sequence[int]) -> None:
        """Workers are lost: by the rule of the job it ends, or they leave, or others take their places."""
        self._coordinator.lose(workers)
        self._apply_complete_steps(self._step_executor)

    def create_table(self, spec: TableSpec) -> None:
        """See `protos.store.Store`."""
        self._parameters.create_table(spec)

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """See `protos.store.Store`; `values` are this store's piece."""
        self._parameters.create_dense(spec, values)

    # Moving data

    def with_bfloat16(self) -> Self:
        """See `protos.store.Store`: nothing goes over a wire here."""
        return self

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `protos.store.Store`; done when returned, unless it waits for `at`."""
        coordinator = self._coordinator
        tables = {name: self._parameters.table(name) for name in keys}

        def answer() -> Pulled:
            version = coordinator.version  # read first: the rows may have more, never less
            rows = {name: table.pull(keys[name], missing) for name, table in tables.items()}
            if (before := self._values_before(at)) is not None:
                for name, values in rows.items():
                    before.restore_rows(name, keys[name], values)
            return Pulled(rows, version)

        return coordinator.at_version(at, answer)

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; `into` has the length of this process's pieces."""
        coordinator = self._coordinator
        blocks = {name: self._parameters.block(name) for name in into}
        for name, block in blocks.items():
            if into[name].shape != (block.length,):
                raise ProtocolError(
                    f"pull of dense block {name!r} into shape {into[name].shape}, expected "
                    f"({block.length},)"
                )

        def answer() -> Version:
            version = coordinator.version
            for name, block in blocks.items():
                block.pull(into[name])
            if (before := self._values_before(at)) is not None:
                for name, values in into.items():
                    before.restore_block(name, values)
            return version

        return coordinator.at_version(at, answer)

    def _values_before(self, at: Version | None) -> BeforeStep | None:
        """Returns the values at version `at` if the store is beyond it, or on its way; None: it is not.

        To be called after values were read. A worker in step waits for others at every version, so only one
        that repeats its part of a step, in the place of a lost process, finds the store beyond it.
        """
        if at is None or not self._coordinator.waits_for_lost:
            return None
        before = self._before_step
        is_applying = before is not None and before.step == at  # the version may not say so yet
        if at >= self._coordinator.version and not is_applying:
            return None
        return require_values_at(
            at,
            before,
            newest=self._coordinator.version,
            num_evicted=self._parameters.num_evicted(),
        )

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """See `protos.store.Store`; done when returned."""
        coordinator = self._coordinator
        coordinator.require_member(worker)
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        if coordinator.take_replaced(worker):
            self._parameters.reset_subscribers()  # a new process has none of what the lost one knew
        recording = {name: self._parameters.recording_table(name) for name in tables}
        version, room = coordinator.version, max_rows
        rows: dict[str, tuple[Keys, Values]] = {}
        for name, table in recording.items():
            rows[name] = keys, _ = table.take_changed(worker, room) if room else _no_rows(table)
            room -= keys.size
        return Answered(Changed(rows, version, has_more=not room))

    def pull_pieces(
        self, blocks: Sequence[str], *, at: Version | None = None
    ) -> Future[PulledPieces]:
        """Reads this process's pieces of dense blocks; otherwise as `pull_dense`."""
        coordinator = self._coordinator
        pieces = {name: self._parameters.block(name) for name in blocks}

        def answer() -> PulledPieces:
            version = coordinator.version
            into = {name: np.empty(block.length, np.float32) for name, block in pieces.items()}
            for name, block in pieces.items():
                block.pull(into[name])
            if (before := self._values_before(at)) is not None:
                for name, values in into.items():
                    before.restore_block(name, values)
            return PulledPieces(into, version)

        return coordinator.at_version(at, answer)

    def dim(self, table: str) -> int:
        """Returns the width of a table's embeddings."""
        return self._parameters.table(table).spec.dim

    def piece_length(self, block: str) -> int:
        """Returns the length of this process's piece of a dense block."""
        return self._parameters.block(block).length

    def row_width(self, table: str) -> int:
        """Returns the numbers of a table's row, weights and optimizer state."""
        found = self._parameters.table(table)
        return found.spec.dim + found.state_width

    def stretch_values(self, stretch: Stretch) -> int:
        """Returns the numbers of a stretch: weights, their optimizer state, and that of the block."""
        (slots, _), (scalars,) = self._parameters.block(stretch.block).state_shapes
        return (1 + slots) * (stretch.stop - stretch.start) + scalars

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`."""
        self._coordinator.require_push(push_id)
        return self._push(gradients, push_id, at)

    def push_pull(
        self,
        gradients: Gradients,
        push_id: PushId,
        *,
        keys: Mapping[str, Keys],
        into: Mapping[str, Values],
        at: Version | None = None,
    ) -> tuple[Future[Pulled], Future[Version]]:
        """See `protos.store.Store`."""
        return push_then_pull(self, gradients, push_id, keys=keys, into=into, at=at)

    def _push(self, gradients: Gradients, push_id: PushId, at: Version | None) -> Future[Version]:
        """Pushes with a push id that was checked."""
        coordinator = self._coordinator
        self._parameters.check(gradients)
        if at is None:
            return self._push_on_arrival(
                lambda: self._parameters.apply(
                    gradients,
                    push_id.worker,
                    step=coordinator.batches,
                    staleness=max(0, coordinator.version - push_id.pulled),
                ),
                push_id,
            )
        coordinator.push_part(gradients, push_id, at)
        self._apply_complete_steps(self._step_executor)
        return coordinator.when_applied()

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Future[ModelState]:
        """See `protos.store.Store`; done when returned. Of blocks, this process's pieces."""
        return self._coordinator.at_version(None, lambda: self._state_of(keys, blocks))

    def _state_of(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> ModelState:
        parameters = self._parameters
        return ModelState(
            rows=parameters.rows_with_state(keys),
            blocks={name: parameters.block_with_state(name) for name in blocks},
        )

    def pull_state_chunk(
        self, keys: Mapping[str, Keys], stretches: Sequence[Stretch]
    ) -> Future[StateChunk]:
        """Reads rows, and stretches of this process's pieces; otherwise as `pull_state`."""
        parameters = self._parameters

        def answer() -> StateChunk:
            blocks = [
                (
                    each.block,
                    each.start,
                    parameters.block_with_state(each.block, each.start, each.stop),
                )
                for each in stretches
            ]
            return StateChunk(list(parameters.rows_with_state(keys).items()), blocks)

        return self._coordinator.at_version(None, answer)

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """See `protos.store.Store`; of this process's keys and pieces."""
        self._coordinator.require_push(push_id)
        return self._push_state(state, push_id)

    def _push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """Pushes with a push id that was checked."""
        self._parameters.check_state(state)
        return self._push_on_arrival(lambda: self._parameters.write_state(state), push_id)

    def push_chunk(
        self, chunk: PushChunk | StateChunk, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """Takes a chunk of a push; the last to come pushes, the others are answered at once.

        Raises:
            ProtocolError: If it contradicts other chunks of the push, or comes too late; else as `push_grad`
                or `push_state`.
        """
        coordinator = self._coordinator
        if chunk.num_chunks > 1 and coordinator.has_push(push_id, at):
            return coordinator.when_pushed(push_id, at)
        chunks = coordinator.assemble(chunk, push_id)
        if chunks is None:
            return Answered(coordinator.version)
        try:
            if states := [each for each in chunks if isinstance(each, StateChunk)]:
                return self._push_state(join_state(states), push_id)
            parts = [each for each in chunks if isinstance(each, PushChunk)]
            return self._push(join_push(parts), push_id, at)
        except Exception as error:
            if chunk.num_chunks > 1:
                coordinator.refuse_push(push_id, error)
            raise

    def _push_on_arrival(self, apply: Callable[[], None], push_id: PushId) -> Future[Version]:
        """Applies a push that was checked, unless it was applied before."""
        coordinator = self._coordinator
        if not coordinator.begin_arrival(push_id):
            return coordinator.when_pushed(push_id, None)
        try:
            with self._snapshots.changing():
                apply()
                coordinator.note_applied(push_id)
        except BaseException:
            name = self.members.name(push_id.worker)
            logger.exception("push not applied, of %s push=%d", name, push_id.sequence)
            coordinator.abandon_arrival(push_id)
            raise
        return Answered(coordinator.end_arrival(push_id))

    def _apply_complete_steps(self, executor: Executor | None) -> None:
        """Applies complete steps in order, large ones in the executor; no-op while a thread does so."""
        coordinator = self._coordinator
        while (step := coordinator.take_complete_step()) is not None:
            if executor is not None and step.num_values > self._inline_values:
                try:
                    executor.submit(self._apply_from, coordinator, step)
                except BaseException as error:  # as when the system has no thread left
                    coordinator.step_failed(step, error)
                    raise
                return
            self._apply_step(coordinator, step)

    def _apply_from(self, coordinator: Coordinator, step: CompleteStep) -> None:
        self._apply_step(coordinator, step)
        self._apply_complete_steps(None)

    def _apply_step(self, coordinator: Coordinator, step: CompleteStep) -> None:
        try:
            gradients = step.sum()
            with self._snapshots.changing():
                if coordinator.waits_for_lost:
                    self._before_step = self._parameters.before(gradients, step.step)
                self._parameters.apply(gradients, NOBODY, step=coordinator.batches)
                coordinator.step_applied(step)
        except BaseException as error:
            logger.exception("step not applied step=%d", step.step)
            coordinator.step_failed(step, error)
            raise
        coordinator.answer_ready()

    # Steps, barriers and messages

    def wait_version(self, at: Version) -> Future[Version]:
        """See `protos.store.Store`; of this process's parameters."""
        coordinator = self._coordinator
        return coordinator.at_version(at, lambda: coordinator.version)

    def barrier(
        self, name: str, worker: int, *, step: Version, number: int | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; a barrier with a `number` that was passed is answered as it was then."""
        future = self._coordinator.barrier(name, worker, step=step, number=number)
        self._apply_complete_steps(self._step_executor)
        return future

    def all_reduce(
        self,
        name: str,
        worker: int,
        values: Numbers,
        op: ReduceOp,
        *,
        step: Version,
        remember: bool = True,
        number: int | None = None,
    ) -> Future[Reduced]:
        """See `protos.store.Store`; `number` as for `barrier`."""
        future = self._coordinator.all_reduce(
            name, worker, values, op, step=step, remember=remember, number=number
        )
        self._apply_complete_steps(self._step_executor)
        return future

    def advance(
        self, worker: int, clock: int, *, at_least: int, after_barrier: int | None = None
    ) -> Future[int]:
        """See `protos.store.Store`; a call from before a barrier that the worker has left sets no clock."""
        return self._coordinator.advance(
            worker, clock, at_least=at_least, after_barrier=after_barrier
        )

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`."""
        return self._coordinator.post(exchange, message)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """See `protos.store.Store`."""
        return self._coordinator.take(exchange, worker, received=received)

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        coordinator = self._coordinator
        coordinator.leave(worker, step=step)
        self._apply_complete_steps(None)
        if not coordinator.failure:
            coordinator.when_applied().result()

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """See `protos.store.Store`."""
        self._coordinator.abort(worker, reason, comes_again=comes_again)

    def all_left(self) -> bool:
        """Whether every worker has left, and all steps are applied."""
        return self._coordinator.all_left()

    # Checkpoints

    def require_writable(self, root: str) -> None:
        """See `protos.store.Store`; for a store that holds everything."""
        require_writable(root, self.check_folder)

    def check_folder(self, folder: str, token: str) -> None:
        """Checks that `save_share` could write into a folder.

        Raises:
            CheckpointError: If the folder is not in the roots or not the one that holds the token, or cannot
                be written.
        """
        self._roots.require([folder])
        check_folder(folder, token, self.server_index)

    def save(self, request: SaveRequest) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        base = open_base(request.base, request.url) if request.base else None

        def write_shares(folder: str, token: str) -> list[Share]:
            self.snapshot(token, "" if base is None else base.token)
            if request.on_snapshot is not None:
                request.on_snapshot()
            return [self.save_share(folder, token, request.inference)]

        tables, blocks = self._parameters.saved_specs()
        return save_checkpoint(
            request.url,
            write_shares=write_shares,
            tables=tables,
            blocks=blocks,
            attachments=request.attachments,
            base=base,
            is_inference=request.inference is not None,
        )

    def snapshot(
        self,
        token: str,
        base: str = "",
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_taken: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes a snapshot of this process's parameters, for the `save_share` with the same token.

        That has to follow soon; after a minute, or when another snapshot is taken, this one is dropped.

        Args:
            token: Of the save to come.
            base: Token of the save on which it is based, as a delta; empty: it is a full one.
            around: Held around the moment of the snapshot; not if the token has had one already.
            on_taken: Called while nothing has changed the store since.

        Raises:
            CheckpointError: If memory is short.
            UnknownChangesError: If another save than the base was the last here.
            WaitTimeoutError: If another save does not end in time.
            AbortedError: If the job has ended by an error: parameters may have a part of a step.
        """
        self._parameters.prepare_snapshot()

        def take_snapshot() -> StoreSnapshot:
            return self._parameters.take_snapshot(self._coordinator.applied(), base)

        self._snapshots.take(token, take_snapshot, around, on_taken)

    def save_share(
        self, folder: str, token: str, inference: InferenceSettings | None = None
    ) -> Share:
        """Writes this process's shards and pieces into a folder, and returns the entries written.

        They are as of the snapshot of the same token, which ends with this.

        Args:
            folder: Of a save in progress.
            token: Of that save.
            inference: Contents of an inference checkpoint; None: everything.

        Raises:
            CheckpointError: If the folder is not in the roots or not the one that holds the token, or cannot
                be written; for inference also if a table keeps no scores, or weights are too large for the
                dtype.
            ProtocolError: If there is no such snapshot.
        """
        with self._snapshots.writing(token, is_base=inference is None) as snapshot:
            self._roots.require([folder])
            shared = shared_folder(folder, token)
            where = (shared, self.server_index, snapshot.tables, snapshot.blocks)
            applied = snapshot.applied
            if inference is not None:
                entries = write_inference_share(*where, inference)
                return Share(
                    entries=tuple(entries), version=applied.version, batches=applied.batches
                )
            entries = write_share(
                *where,
                candidates=snapshot.candidates,
                counters=snapshot.counters,
                removed=snapshot.removed,
            )
            self._parameters.base = token
        return Share(
            entries=tuple(entries),
            version=applied.version,
            batches=applied.batches,
            workers=applied.workers,
        )

    def between_saves(self, what: str) -> AbstractContextManager[None]:
        """Held while no save may run, by who calls `load` or `shrink` within; `what` is for messages.

        Raises:
            WaitTimeoutError: If a save does not end in time.
        """
        return self._snapshots.between_saves(what)

    def load(
        self,
        url: str,
        *,
        only: Collection[str] = (),
        token: str = "",
        is_between_saves: bool = False,
        on_shard: Callable[[], None] | None = None,
    ) -> None:
        """See `protos.store.Store`; reads this process's shards and pieces.

        `is_between_saves` says that the caller holds `between_saves`; `on_shard` is called after each shard.
        """
        with nullcontext() if is_between_saves else self.between_saves("a load"):
            checkpoint = self._roots.open(url)
            checkpoint.require_token(token)
            on_shard = on_shard or self._on_shard
            self._parameters.load(checkpoint, only, self._snapshots.alone, on_shard)

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int = 0
    ) -> None:
        """See `protos.store.Store`."""
        self._coordinator.resume(version, progress, batches)

    def shrink(
        self,
        *,
        max_norm: float | None = None,
        dry_run: bool = False,
        is_between_saves: bool = False,
    ) -> Mapping[str, Shrunk]:
        """See `protos.store.Store`; of this process's shards. `is_between_saves` is as for `load`."""
        with nullcontext() if is_between_saves else self.between_saves("a shrink"):
            return self._parameters.shrink(max_norm=max_norm, dry_run=dry_run)

    def shard_digests(self) -> dict[tuple[str, int], bytes]:
        """Returns the digest of each shard that this process holds, by table and shard."""
        return self._parameters.shard_digests()

    def digest(self) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        if self.shard_map.num_servers > 1:
            raise ProtocolError("one server of several cannot see the whole model; ask the client")
        return model_digest(self._parameters.dense_vectors(), self.shard_digests())

    def status(self) -> StoreStatus:
        """See `protos.store.Store`."""
        return self._coordinator.status(self._parameters.table_status(), self._snapshots.last)


def _no_rows(table: SparseTable) -> tuple[Keys, Values]:
    return np.empty(0, np.uint64), np.empty((0, table.spec.dim), np.float32)
