"""What a coordinator knows at one moment: written to the update log, and taken over by a restarted server.

    coordinator --state, waiting--> update log --restore, the waiting calls once more--> coordinator

What others wait for, or are to take, is not in the state but beside it: parts of steps, chunks of pushes,
arrivals at barriers, messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import (
    Lease,
    Message,
    Numbers,
    PushId,
    ReduceOp,
    Staleness,
    StateChunk,
    Version,
    WorkerProgress,
)
from ctr_ps.ps_server.coordination.push_ledger import AppliedPushes

Chunk = PushChunk | StateChunk
"""A chunk of a push of gradients, or of state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersState:
    """See `Membership`: terms by name, each with who brought it; all other mappings are by worker."""

    incarnations: Mapping[int, int]
    terms: Mapping[str, tuple[str, str]]
    lease: Lease | None
    left: Sequence[int]
    lost: Sequence[int]
    candidates: Mapping[int, int]
    formats: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedBarrier:
    """A barrier that a worker has passed, by its number among those of the worker, and its answer."""

    worker: int
    number: int
    name: str
    version: Version
    # those of an all-reduce, float64 little-endian in hexadecimal digits, as JSON has no infinite
    # numbers; None if they are forgotten, too
    values: str | None
    remember: bool = True  # whether `values` are kept when the next barrier is passed
    # it was passed together with the last one in the list, which has the `values`
    with_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedBy:
    """What a worker has posted to an inbox: its next number, and where its last message begins and ends."""

    sequence: int = 0
    start: int = 0
    end: int = 0
    has_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxState:
    """A receiver's messages of an exchange, besides those that are held; see `Mailbox`."""

    exchange: str
    receiver: int
    senders: Mapping[int, PostedBy]
    received: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQueueState:
    """The files of a pass; see `FileQueue`. Mappings are by worker."""

    pass_number: int = 0
    num_files: int = 0
    num_taken: int = 0
    given_back: Sequence[int] = ()
    taken: Mapping[int, Sequence[int]] = field(default_factory=dict)
    trained: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job, as one store sees it; mappings are by worker."""

    members: MembersState
    version: Version
    batches: int = 0  # in older logs, which have no schedule
    # the first step of which its part is neither applied nor among the waiting ones
    next_step: Mapping[int, Version]
    since: Mapping[int, Version]  # the step at which it last left a barrier
    # of one that has left or came to a barrier, the first step in which it takes no part
    absent_from: Mapping[int, Version]
    in_steps: bool = False  # the last push was a part of a step
    progress: Mapping[int, WorkerProgress]
    applied: Mapping[int, AppliedPushes]  # pushes on arrival
    examples: Mapping[int, int]  # of applied pushes, as `staleness`
    staleness: Staleness
    passed: Sequence[PassedBarrier]  # barriers, the oldest first
    clocks: Mapping[int, int]  # of those that train
    inboxes: Sequence[InboxState]  # those of one receiver in the order of its exchanges
    files: FileQueueState = FileQueueState()  # in logs of 0.1, which deal none


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPart:
    """A worker's part of a step that is not applied yet."""

    push_id: PushId
    step: Version
    gradients: Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingChunk:
    """A chunk of a push that lacks others."""

    push_id: PushId
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingArrival:
    """A worker that waits at a barrier; `values`, `op` and `remember` are those of an all-reduce."""

    name: str
    worker: int
    step: Version
    number: int
    values: Numbers | None
    op: ReduceOp | None
    remember: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A message that its receiver has not taken, or not acknowledged."""

    exchange: str
    message: Message


Waiting = WaitingPart | WaitingChunk | WaitingArrival | WaitingMessage
