"""Request dataclasses, one per RPC with several arguments, named after it and the store's method.

Fields are those of the message and, unless the call has a handler of its own, parameters of that method, as
`Join` has those of `Coordination.join`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import (
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
from ctr_ps.protos.store.moves import Cut, LogRecord, Moved, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """See `Coordination.join`; with `only_asks`, answered when the place is free, without taking it."""

    member: Member
    terms: Mapping[str, str]
    lease: Lease | None = None
    only_asks: bool = False
    shard_map_epoch: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    member: Member
    is_last: bool = False
    acknowledged: Acknowledged | None = None
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTable:
    spec: TableSpec
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateDense:
    """See `Parameters.create_dense`; `values` are the server's piece."""

    spec: DenseSpec
    values: Values | None = None
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSparse:
    """See `ParameterReader.pull_sparse`, for the server's keys."""

    keys: Mapping[str, Keys]
    missing: Missing
    at: Version | None = None
    shard_map_epoch: int
    bfloat16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullDense:
    """See `ParameterReader.pull_dense`, for the server's pieces."""

    blocks: Sequence[str]
    at: Version | None = None
    shard_map_epoch: int
    bfloat16: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushGrad:
    """One chunk of a push; see `Parameters.push_grad`."""

    chunk: PushChunk
    push_id: PushId
    at: Version | None = None
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPull:
    """A whole push, then a read; see `Parameters.push_pull`."""

    push: PushGrad
    sparse: PullSparse
    dense: PullDense

    @property
    def at(self) -> Version | None:
        """The awaited version."""
        return self.sparse.at


@dataclass(frozen=True, slots=True, kw_only=True)
class PullState:
    """See `StateTransfer.pull_state`, for the server's keys and stretches of its pieces."""

    keys: Mapping[str, Keys]
    stretches: Sequence[Stretch]
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PushState:
    """One chunk of a push; see `StateTransfer.push_state`."""

    chunk: StateChunk
    push_id: PushId
    shard_map_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullChanged:
    tables: Sequence[str]
    member: Member
    max_rows: int
    shard_map_epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    exchange: str
    message: Message
    member: Member
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    exchange: str
    member: Member
    received: int
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitVersion:
    at: Version
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    name: str
    member: Member
    step: Version
    number: int
    acknowledged: Acknowledged | None = None
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    name: str
    member: Member
    values: Numbers
    op: ReduceOp
    step: Version
    number: int
    acknowledged: Acknowledged | None = None
    remember: bool = True
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    member: Member
    clock: int
    at_least: int
    after_barrier: int
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeFile:
    member: Member
    pass_number: int
    num_files: int
    received: int
    waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    member: Member
    step: Version
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    member: Member
    reason: str
    comes_again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFolder:
    """Checks that a server can save into a folder, which holds the token."""

    folder: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Takes a snapshot, to be saved with the same token; `base` is the token of a delta's base."""

    token: str
    base: str = ""
    member: Member
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Writes the server's share of a checkpoint; `inference` as in `SaveRequest`."""

    folder: str
    token: str
    inference: InferenceSettings | None = None
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """See `Checkpoints.load`, for the server's share."""

    url: str
    token: str = ""
    only: Sequence[str] = ()
    member: Member
    number: int
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    version: Version
    progress: Mapping[int, WorkerProgress]
    batches: int
    member: Member
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink:
    """See `Admin.shrink`, for the server's shards."""

    max_norm: float | None = None
    dry_run: bool = False
    member: Member
    number: int
    shard_map_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginMove:
    token: str
    shard_map: ShardMap


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeMoved:
    token: str
    number: int
    server: int
    max_bytes: int
    with_counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMoved:
    token: str
    number: int
    moved: Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldMove:
    token: str
    number: int
    phase: Phase
    cut: Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class GetJobState:
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMove:
    token: str
    server: int
    progress: Mapping[int, WorkerProgress]
    records: Sequence[LogRecord] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMove:
    token: str
    is_committed: bool
    epoch: int = 0
