"""The seam between a trainer and its parameters, wherever they are: the sum of seven facets.

`ps_server.store.ParameterStore` is a store in process, `ps_worker.cluster.client.ClusterClient`
is one over gRPC; one contract suite (tests/contract) runs over both.

Calls that move data return futures: complete already in process, pending over the wire. Waiting for
one never lasts longer than the store's time limits, then it raises.
"""

from typing import Protocol

from ctr_ps.protos.futures import Future
from ctr_ps.protos.store.checkpoints import (
    Applied,
    Checkpoints,
    InferenceDtype,
    InferenceSettings,
    SaveRequest,
    WorkerProgress,
)
from ctr_ps.protos.store.coordination import (
    LONGEST_RENEWAL_S,
    MAX_NUMBERS,
    RESTART,
    Coordination,
    Exchange,
    Joined,
    Lease,
    Member,
    Message,
    Numbers,
    Reduced,
    ReduceOp,
    TakenFile,
    WorkerLoss,
    abort_reason,
    require_numbers,
)
from ctr_ps.protos.store.parameters import (
    FILE,
    Acknowledged,
    Changed,
    Changes,
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
from ctr_ps.protos.store.state_transfer import (
    BlockState,
    ModelState,
    RowStates,
    StateChunk,
    StateTransfer,
    Stretch,
)
from ctr_ps.protos.store.status import (
    Admin,
    SaveStatus,
    ServerStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    StreamOffer,
    TableStatus,
    WorkerState,
    merge_progress,
    merge_status,
    sum_by_name,
)


class Store(
    Parameters, StateTransfer, Changes, Coordination, Exchange, Checkpoints, Admin, Protocol
):
    """All parameters of a job: tables of rows and dense blocks. Thread-safe."""
