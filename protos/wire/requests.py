"""What calls are given, where that is more than one value: a dataclass an RPC, named as it is.

Their fields are those of the messages and, but for calls with a handler of their own, parameters of the
store's method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.chunking import PushChunk
from protos.gradients import Values
from protos.keys import Keys
from protos.spec import DenseSpec
from protos.store import (
    Acknowledged,
    InferenceSettings,
    Lease,
    Member,
    Message,
    Missing,
    Numbers,
    PushId,
    ReduceOp,
    StateChunk,
    Stretch,
    Version,
    WorkerProgress,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """See `Coordination.join`; one that only asks is answered when the place is free, and takes nothing."""

    member: Member
    terms: Mapping[str, str]
    lease: Lease | None = None
    only_asks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """See `Coordination.renew`."""

    member: Member
    is_last: bool = False
    acknowledged: Acknowledged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateDense:
    """See `Parameters.create_dense`; of the server's piece."""

    spec: DenseSpec
    values: Values | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSparse:
    """See `ParameterReader.pull_sparse`; of the server's keys."""

    keys: Mapping[str, Keys]
    missing: Missing
    at: Version | None = None
    shard_map_epoch: int
    bfloat16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDense:
    """Request for a server's pieces of dense blocks."""

    blocks: Sequence[str]
    at: Version | None = None
    shard_map_epoch: int
    bfloat16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushGrad:
    """Request that hands over one chunk of a push; see `Parameters.push_grad`."""

    chunk: PushChunk
    push_id: PushId
    at: Version | None = None
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPull:
    """Request that hands over a whole push, and then reads; see `Parameters.push_pull`."""

    push: PushGrad
    sparse: PullSparse
    dense: PullDense

    @property
    def at(self) -> Version | None:
        """The version that it waits for."""
        return self.sparse.at


@dataclass(frozen=True, slots=True, kw_only=True)
class PullState:
    """See `StateTransfer.pull_state`; of the server's keys, and stretches of its pieces."""

    keys: Mapping[str, Keys]
    stretches: Sequence[Stretch]
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushState:
    """Request that hands over one chunk of a push; see `StateTransfer.push_state`."""

    chunk: StateChunk
    push_id: PushId
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullChanged:
    """See `Changes.pull_changed`."""

    tables: Sequence[str]
    member: Member
    max_rows: int
    shard_map_epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """See `Exchange.post`."""

    exchange: str
    message: Message
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """See `Exchange.take`."""

    exchange: str
    member: Member
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitVersion:
    """See `Coordination.wait_version`."""

    at: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """See `Coordination.barrier`."""

    name: str
    member: Member
    step: Version
    number: int
    acknowledged: Acknowledged | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """See `Coordination.all_reduce`."""

    name: str
    member: Member
    values: Numbers
    op: ReduceOp
    step: Version
    number: int
    acknowledged: Acknowledged | None = None
    remember: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """See `Coordination.advance`."""

    member: Member
    clock: int
    at_least: int
    after_barrier: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """See `Coordination.leave`."""

    member: Member
    step: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """See `Coordination.abort`."""

    member: Member
    reason: str
    comes_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFolder:
    """Request to check that a server could save into a folder, which holds the token."""

    folder: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Request for a snapshot, to be saved with the same token; `base` is the token of a delta's base."""

    token: str
    base: str = ""
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Request that a server writes its share of a checkpoint; `inference` as in `SaveRequest`."""

    folder: str
    token: str
    inference: InferenceSettings | None = None
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """See `Checkpoints.load`; of the server's share."""

    url: str
    token: str = ""
    only: Sequence[str] = ()
    member: Member
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """See `Checkpoints.resume`."""

    version: Version
    progress: Mapping[int, WorkerProgress]
    batches: int
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """See `Admin.shrink`; of the server's shards."""

    max_norm: float | None = None
    dry_run: bool = False
    member: Member
    number: int
