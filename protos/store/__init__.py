"""The seam between a trainer and its parameters, wherever they are."""

from protos.store.message import Message
from protos.store.numbers import MAX_NUMBERS, Numbers, require_numbers
from protos.store.progress import merge_progress
from protos.store.save_status import SaveStatus
from protos.store.staleness import Staleness, merge_staleness
from protos.store.store import (
    Changed,
    Future,
    InferenceDtype,
    InferenceSettings,
    Missing,
    Pulled,
    PushId,
    Reduced,
    ReduceOp,
    Store,
    StoreStatus,
    Version,
    WorkerProgress,
)
from protos.store.table_status import Shrunk, TableStatus

__all__ = [
    "MAX_NUMBERS",
    "Changed",
    "Future",
    "InferenceDtype",
    "InferenceSettings",
    "Message",
    "Missing",
    "Numbers",
    "Pulled",
    "PushId",
    "ReduceOp",
    "Reduced",
    "SaveStatus",
    "Shrunk",
    "Staleness",
    "Store",
    "StoreStatus",
    "TableStatus",
    "Version",
    "WorkerProgress",
    "merge_progress",
    "merge_staleness",
    "require_numbers",
]
