"""The seam between a trainer and its parameters, wherever they are."""

from protos.futures import Future
from protos.store.admin import Admin
from protos.store.changes import Changed, Changes
from protos.store.checkpoints import (
    Applied,
    Checkpoints,
    InferenceDtype,
    InferenceSettings,
    SaveRequest,
    WorkerProgress,
)
from protos.store.coordination import (
    MAX_NUMBERS,
    Coordination,
    Joined,
    Lease,
    Member,
    Numbers,
    Reduced,
    ReduceOp,
    WorkerLoss,
    require_numbers,
)
from protos.store.exchange import Exchange, Message
from protos.store.parameters import (
    Acknowledged,
    Missing,
    ParameterReader,
    Parameters,
    Pulled,
    PulledPieces,
    PushedPulled,
    PushId,
    Version,
    push_then_pull,
)
from protos.store.staleness import Staleness, merge_staleness
from protos.store.state_chunks import StateChunk, Stretch
from protos.store.state_transfer import BlockState, ModelState, RowStates, StateTransfer
from protos.store.status import (
    SaveStatus,
    ServerStatus,
    Shrunk,
    StoreStatus,
    TableStatus,
    WorkerState,
    merge_progress,
    merge_saves,
    merge_shrunk,
    merge_status,
)
from protos.store.store import Store

__all__ = [
    "MAX_NUMBERS",
    "Acknowledged",
    "Admin",
    "Applied",
    "BlockState",
    "Changed",
    "Changes",
    "Checkpoints",
    "Coordination",
    "Exchange",
    "Future",
    "InferenceDtype",
    "InferenceSettings",
    "Joined",
    "Lease",
    "Member",
    "Message",
    "Missing",
    "ModelState",
    "Numbers",
    "ParameterReader",
    "Parameters",
    "Pulled",
    "PulledPieces",
    "PushId",
    "PushedPulled",
    "ReduceOp",
    "Reduced",
    "RowStates",
    "SaveRequest",
    "SaveStatus",
    "ServerStatus",
    "Shrunk",
    "Staleness",
    "StateChunk",
    "StateTransfer",
    "Store",
    "StoreStatus",
    "Stretch",
    "TableStatus",
    "Version",
    "WorkerLoss",
    "WorkerProgress",
    "WorkerState",
    "merge_progress",
    "merge_saves",
    "merge_shrunk",
    "merge_staleness",
    "merge_status",
    "push_then_pull",
    "require_numbers",
]
