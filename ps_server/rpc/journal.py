"""What a server writes to its update log, and when.

    call --shared--> written --> carried out --> durable --> answered
    snapshot --alone--> taken --> new segment: the state as it was at the snapshot
    save --> where its checkpoint is; the segments before go once it is published

Every logged call is idempotent, so a log may have calls that a checkpoint has, too, and a call that was
refused is refused again.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ctr_ps.protos.chunking import PushChunk, join_push
from ctr_ps.protos.errors import CheckpointError, LogError, ProtocolError
from ctr_ps.protos.format import FORMAT, require_format
from ctr_ps.protos.futures import Future
from ctr_ps.protos.placement import FIRST_EPOCH, ShardMap
from ctr_ps.protos.runtime.environment import own_version
from ctr_ps.protos.store import Member, Shrunk, StateChunk
from ctr_ps.protos.store.moves import LogRecord
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.coordination.job_state import (
    JobState,
    Waiting,
    WaitingArrival,
    WaitingChunk,
    WaitingMessage,
    WaitingPart,
)
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.durability.update_log import UpdateLog
from ctr_ps.ps_server.engine.journal import EngineState, Journal, Owner
from ctr_ps.ps_server.snapshot.phase_lock import PhaseLock

logger = logging.getLogger(__name__)

STATE, RESUMED, SAVED, MESSAGE, PART = "state", "resumed", "saved", "message", "part"
"""Kinds of records besides the calls, and the events of engine/journal.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedState:
    """Calls of this job that are not carried out again."""

    # what shrinks were answered, by worker and number of the shrink
    shrinks: Mapping[int, Mapping[int, Mapping[str, Shrunk]]] = field(default_factory=dict)
    # incarnation and number of loads, by worker, in the order in which they were carried out
    loads: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def digest(self) -> str:
        """Returns a digest of the last shrink and load of each worker.

        One before them may have failed on some servers, and was given again under another number.
        """
        # A process in another's place comes to its shrinks again: they may be in another order here.
        shrinks = {worker: max(each) for worker, each in sorted(self.shrinks.items()) if each}
        loads = {worker: each[-1] for worker, each in sorted(self.loads.items()) if each}
        return hashlib.sha256(repr((shrinks, loads)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """A server at the beginning of a segment; see `EngineState`."""

    owner: Owner
    base: str  # token of the save that has its parameters; empty: they were fresh
    jobs_before: int
    job: JobState
    completed: CompletedState  # calls of this job that are not carried out again
    written_by: str  # version of the package that began the segment
    format: int = 0  # of what it wrote, from 1 on
    shard_map: ShardMap | None = None  # None: the first one
    last_move: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedBy:
    """Which release writes the records that follow, after another format's."""

    written_by: str
    format: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAt:
    """A save, and the checkpoint that it is part of once that is published."""

    token: str
    url: str

    @property
    def is_published(self) -> bool:
        """Whether the checkpoint at the url is that of the save."""
        try:
            return Checkpoint.open(self.url).token == self.token
        except CheckpointError:
            return False


_AFTER_STATE = {
    PART,
    MESSAGE,
    *(
        call.name
        for call in (
            calls.CREATE_TABLE,
            calls.CREATE_DENSE,
            calls.PUSH_GRAD,
            calls.PUSH_STATE,
            calls.BARRIER,
            calls.ALL_REDUCE,
        )
    ),
}
"""Kinds of the other records of a head."""

STATE_JSON = TypeAdapter(ServerState)
RESUMED_JSON = TypeAdapter(ResumedBy)
SAVED_JSON = TypeAdapter(SavedAt)


class UpdateJournal(Journal):
    """A journal in an update log. Thread-safe."""

    def __init__(
        self,
        log: UpdateLog,  # where to write
        # returns the calls of this job that are not carried out again
        completed: Callable[[], CompletedState],
        *,
        wait_limit_s: float,  # how long a snapshot waits for calls that are being carried out
    ) -> None:
        """Continues a log."""
        self._log = log
        self._completed = completed
        self._wait_limit_s = wait_limit_s
        self._lock = PhaseLock()
        self._bases: dict[int, str] = {}  # the saves with which segments begin
        self._saved: dict[str, SavedAt] = {}

    @contextmanager
    def written(self, kind: str, payload: bytes) -> Iterator[None]:
        with self._lock.shared():
            self._log.append(kind, payload)
            start = time.perf_counter()
            yield
            # Two threads at once may lose the time of a call.
            self._log.replay_s += time.perf_counter() - start

    def durable(self) -> Future[None]:
        return self._log.durable()

    def prepare_segment(self) -> None:
        self._remove_old()
        self._log.sync()  # most of it now: calls that change the server wait while a segment begins

    def alone(self) -> AbstractContextManager[None]:
        return self._lock.alone(self._wait_limit_s)

    def begin_segment(self, token: str, state: EngineState) -> None:
        head = state_records(state, self._completed(), base=token)
        self._bases[self._log.begin_segment(head)] = token

    def saved(self, token: str, folder: str) -> None:
        if token not in self._bases.values():
            # A segment of this token may have begun before a restart, and a move: with an older snapshot.
            return
        saved = SavedAt(token=token, url=folder.rstrip("/").rpartition("/")[0])
        self._saved[token] = saved
        with self.written(SAVED, SAVED_JSON.dump_json(saved)):
            pass

    def _remove_old(self) -> None:
        """Removes the segments before the newest whose checkpoint is published."""
        for segment, token in sorted(self._bases.items(), reverse=True):
            if token in self._saved and self._saved[token].is_published:
                self._log.remove_before(segment)
                self._bases = {each: of for each, of in self._bases.items() if each >= segment}
                self._saved = {
                    of: self._saved[of] for of in self._bases.values() if of in self._saved
                }
                logger.info(
                    "update log shortened: removed the segments older than segment=%d log_bytes=%d",
                    segment,
                    self._log.size_bytes,
                )
                return


def state_records(state: EngineState, completed: CompletedState, *, base: str) -> list[Record]:
    """Returns the head of a segment: what `recover` makes an empty engine the same as this with.

    `base` is the token of the save that has its parameters.
    """
    job = ServerState(
        owner=state.owner,
        base=base,
        jobs_before=state.jobs_before,
        job=state.job,
        completed=completed,
        written_by=own_version(),
        shard_map=None if state.shard_map.epoch == FIRST_EPOCH else state.shard_map,
        last_move=state.last_move,
        format=FORMAT,
    )
    return [
        Record(STATE, STATE_JSON.dump_json(job)),
        *(_record(calls.CREATE_TABLE, requests.CreateTable(spec=spec)) for spec in state.tables),
        *(
            _record(calls.CREATE_DENSE, requests.CreateDense(spec=spec, values=given))
            for spec, given in state.blocks
        ),
        *(_record_of_waiting(each, state.job, state.shard_map.epoch) for each in state.waiting),
    ]


def require_head(records: Sequence[LogRecord]) -> None:
    """Raises ProtocolError unless `state_records` may have returned these."""
    kinds = [each.kind for each in records]
    if kinds[:1] != [STATE] or not _AFTER_STATE.issuperset(kinds[1:]):
        raise ProtocolError(f"the state of a job has records of the kinds {sorted(set(kinds))}")
    try:
        state = STATE_JSON.validate_json(records[0].payload)
    except ValidationError as error:
        raise ProtocolError(f"the state of a job cannot be read: {error}") from error
    require_format(state.format, "the job's first server")


def first_records(state: EngineState, loaded: Checkpoint | None) -> list[Record]:
    """Returns the head of the first segment of a log; without a checkpoint, the parameters are fresh."""
    if loaded is None:
        return state_records(state, CompletedState(), base="")
    # The folder that was loaded may name another checkpoint as its latest when this one is loaded again.
    saved = SavedAt(token=loaded.token, url=loaded.url)
    return [
        *state_records(state, CompletedState(), base=loaded.token),
        Record(SAVED, SAVED_JSON.dump_json(saved)),
    ]


def resumed_record() -> Record:
    """Returns the record with which this release begins to write to the log of another format."""
    resumed = ResumedBy(written_by=own_version(), format=FORMAT)
    return Record(RESUMED, RESUMED_JSON.dump_json(resumed))


def _record_of_waiting(waiting: Waiting, job: JobState, epoch: int) -> Record:
    incarnations = job.members.incarnations
    match waiting:
        case WaitingPart():
            whole = PushChunk(
                sparse=list(waiting.gradients.sparse.items()),
                dense=[(name, 0, grad) for name, grad in waiting.gradients.dense.items()],
            )
            push = requests.PushGrad(
                chunk=whole, push_id=waiting.push_id, at=waiting.step, shard_map_epoch=epoch
            )
            # It counts, also if its process has its place no more.
            return Record(PART, calls.PUSH_GRAD.request.encode(push))
        case WaitingChunk(push_id=push_id, chunk=chunk):
            if isinstance(chunk, StateChunk):
                state = requests.PushState(chunk=chunk, push_id=push_id, shard_map_epoch=epoch)
                return _record(calls.PUSH_STATE, state)
            part = requests.PushGrad(chunk=chunk, push_id=push_id, at=None, shard_map_epoch=epoch)
            return _record(calls.PUSH_GRAD, part)
        case WaitingArrival():
            return _arrival(waiting, Member(waiting.worker, incarnations[waiting.worker]))
        case WaitingMessage(exchange=exchange, message=message):
            sender = Member(message.sender, incarnations.get(message.sender, 0))
            post = requests.Post(exchange=exchange, message=message, member=sender)
            return Record(MESSAGE, calls.POST.request.encode(post))


def _record(call: Call[Any, Any], argument: Any) -> Record:
    return Record(call.name, call.request.encode(argument))


def waiting_part(payload: bytes) -> WaitingPart:
    """Returns the part of a step that a record has; raises LogError if it is of no step."""
    push = calls.PUSH_GRAD.request.decode(payload)
    if push.at is None:
        raise LogError("the update log is damaged: it has a waiting part without a step")
    return WaitingPart(push_id=push.push_id, step=push.at, gradients=join_push([push.chunk]))


def _arrival(waiting: WaitingArrival, member: Member) -> Record:
    name, step, number = waiting.name, waiting.step, waiting.number
    if waiting.values is None or waiting.op is None:
        barrier = requests.Barrier(name=name, member=member, step=step, number=number)
        return _record(calls.BARRIER, barrier)
    numbers = requests.AllReduce(
        name=name,
        member=member,
        step=step,
        number=number,
        values=waiting.values,
        op=waiting.op,
        remember=waiting.remember,
    )
    return _record(calls.ALL_REDUCE, numbers)
