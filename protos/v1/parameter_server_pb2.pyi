from ctr_ps.protos.v1 import data_plane_pb2 as _data_plane_pb2
from ctr_ps.protos.v1 import moves_pb2 as _moves_pb2
from ctr_ps.protos.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerLoss(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_LOSS_UNSPECIFIED: _ClassVar[WorkerLoss]
    WORKER_LOSS_FAIL: _ClassVar[WorkerLoss]
    WORKER_LOSS_WAIT: _ClassVar[WorkerLoss]
    WORKER_LOSS_CONTINUE: _ClassVar[WorkerLoss]

class ReduceOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCE_OP_UNSPECIFIED: _ClassVar[ReduceOp]
    REDUCE_OP_SUM: _ClassVar[ReduceOp]
    REDUCE_OP_MAX: _ClassVar[ReduceOp]
    REDUCE_OP_MIN: _ClassVar[ReduceOp]
WORKER_LOSS_UNSPECIFIED: WorkerLoss
WORKER_LOSS_FAIL: WorkerLoss
WORKER_LOSS_WAIT: WorkerLoss
WORKER_LOSS_CONTINUE: WorkerLoss
REDUCE_OP_UNSPECIFIED: ReduceOp
REDUCE_OP_SUM: ReduceOp
REDUCE_OP_MAX: ReduceOp
REDUCE_OP_MIN: ReduceOp

class Lease(_message.Message):
    __slots__ = ("seconds", "on_worker_loss")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ON_WORKER_LOSS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    on_worker_loss: WorkerLoss
    def __init__(self, seconds: _Optional[float] = ..., on_worker_loss: _Optional[_Union[WorkerLoss, str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("member", "terms", "lease", "only_asks", "shard_map_epoch", "format")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ONLY_ASKS_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    terms: _containers.ScalarMap[str, str]
    lease: Lease
    only_asks: bool
    shard_map_epoch: int
    format: int
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., terms: _Optional[_Mapping[str, str]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., only_asks: bool = ..., shard_map_epoch: _Optional[int] = ..., format: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("jobs_before", "barriers_passed", "has_update_log", "version", "restart")
    JOBS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BARRIERS_PASSED_FIELD_NUMBER: _ClassVar[int]
    HAS_UPDATE_LOG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    jobs_before: int
    barriers_passed: int
    has_update_log: bool
    version: int
    restart: int
    def __init__(self, jobs_before: _Optional[int] = ..., barriers_passed: _Optional[int] = ..., has_update_log: bool = ..., version: _Optional[int] = ..., restart: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("member", "is_last", "acknowledged", "shard_map_epoch")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    is_last: bool
    acknowledged: Acknowledged
    shard_map_epoch: int
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., is_last: bool = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("pushes", "steps")
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    pushes: int
    steps: int
    def __init__(self, pushes: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("spec", "shard_map_epoch")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    spec: _spec_pb2.TableSpec
    shard_map_epoch: int
    def __init__(self, spec: _Optional[_Union[_spec_pb2.TableSpec, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class CreateTableResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateDenseRequest(_message.Message):
    __slots__ = ("spec", "values", "shard_map_epoch")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    spec: _spec_pb2.DenseSpec
    values: bytes
    shard_map_epoch: int
    def __init__(self, spec: _Optional[_Union[_spec_pb2.DenseSpec, _Mapping]] = ..., values: _Optional[bytes] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class CreateDenseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitVersionRequest(_message.Message):
    __slots__ = ("at", "shard_map_epoch")
    AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    at: int
    shard_map_epoch: int
    def __init__(self, at: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class WaitVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class BarrierRequest(_message.Message):
    __slots__ = ("name", "member", "step", "number", "acknowledged", "shard_map_epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    member: _data_plane_pb2.Member
    step: int
    number: int
    acknowledged: Acknowledged
    shard_map_epoch: int
    def __init__(self, name: _Optional[str] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class BarrierResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class AllReduceRequest(_message.Message):
    __slots__ = ("name", "member", "step", "number", "values", "op", "acknowledged", "remember", "shard_map_epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    member: _data_plane_pb2.Member
    step: int
    number: int
    values: bytes
    op: ReduceOp
    acknowledged: Acknowledged
    remember: bool
    shard_map_epoch: int
    def __init__(self, name: _Optional[str] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., step: _Optional[int] = ..., number: _Optional[int] = ..., values: _Optional[bytes] = ..., op: _Optional[_Union[ReduceOp, str]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., remember: bool = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class AllReduceResponse(_message.Message):
    __slots__ = ("version", "values")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    version: int
    values: bytes
    def __init__(self, version: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class AdvanceRequest(_message.Message):
    __slots__ = ("member", "clock", "at_least", "after_barrier", "shard_map_epoch")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    AFTER_BARRIER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    clock: int
    at_least: int
    after_barrier: int
    shard_map_epoch: int
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., clock: _Optional[int] = ..., at_least: _Optional[int] = ..., after_barrier: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class AdvanceResponse(_message.Message):
    __slots__ = ("slowest",)
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    slowest: int
    def __init__(self, slowest: _Optional[int] = ...) -> None: ...

class TakeFileRequest(_message.Message):
    __slots__ = ("member", "pass_number", "num_files", "received", "waits")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PASS_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_FILES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    pass_number: int
    num_files: int
    received: int
    waits: bool
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., pass_number: _Optional[int] = ..., num_files: _Optional[int] = ..., received: _Optional[int] = ..., waits: bool = ...) -> None: ...

class TakeFileResponse(_message.Message):
    __slots__ = ("file", "was_taken", "is_over")
    FILE_FIELD_NUMBER: _ClassVar[int]
    WAS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    file: int
    was_taken: bool
    is_over: bool
    def __init__(self, file: _Optional[int] = ..., was_taken: bool = ..., is_over: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member", "step", "shard_map_epoch")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    step: int
    shard_map_epoch: int
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., step: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("member", "reason", "comes_again")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMES_AGAIN_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    reason: str
    comes_again: bool
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., reason: _Optional[str] = ..., comes_again: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckFolderRequest(_message.Message):
    __slots__ = ("folder", "token")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    folder: str
    token: str
    def __init__(self, folder: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class CheckFolderResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("token", "base", "member", "shard_map_epoch")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    token: str
    base: str
    member: _data_plane_pb2.Member
    shard_map_epoch: int
    def __init__(self, token: _Optional[str] = ..., base: _Optional[str] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Inference(_message.Message):
    __slots__ = ("dtype", "min_score")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MIN_SCORE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    min_score: float
    def __init__(self, dtype: _Optional[str] = ..., min_score: _Optional[float] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("folder", "token", "inference", "member")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INFERENCE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    folder: str
    token: str
    inference: Inference
    member: _data_plane_pb2.Member
    def __init__(self, folder: _Optional[str] = ..., token: _Optional[str] = ..., inference: _Optional[_Union[Inference, _Mapping]] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("share",)
    SHARE_FIELD_NUMBER: _ClassVar[int]
    share: str
    def __init__(self, share: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("url", "token", "only", "member", "number", "shard_map_epoch")
    URL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    url: str
    token: str
    only: _containers.RepeatedScalarFieldContainer[str]
    member: _data_plane_pb2.Member
    number: int
    shard_map_epoch: int
    def __init__(self, url: _Optional[str] = ..., token: _Optional[str] = ..., only: _Optional[_Iterable[str]] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., number: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShrinkRequest(_message.Message):
    __slots__ = ("max_norm", "dry_run", "member", "number", "shard_map_epoch")
    MAX_NORM_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    max_norm: float
    dry_run: bool
    member: _data_plane_pb2.Member
    number: int
    shard_map_epoch: int
    def __init__(self, max_norm: _Optional[float] = ..., dry_run: bool = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., number: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class Shrunk(_message.Message):
    __slots__ = ("rows", "size_bytes", "left_rows", "candidates")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_ROWS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    rows: int
    size_bytes: int
    left_rows: int
    candidates: int
    def __init__(self, rows: _Optional[int] = ..., size_bytes: _Optional[int] = ..., left_rows: _Optional[int] = ..., candidates: _Optional[int] = ...) -> None: ...

class ShrinkResponse(_message.Message):
    __slots__ = ("tables",)
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Shrunk
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Shrunk, _Mapping]] = ...) -> None: ...
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.MessageMap[str, Shrunk]
    def __init__(self, tables: _Optional[_Mapping[str, Shrunk]] = ...) -> None: ...

class GetDigestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardDigest(_message.Message):
    __slots__ = ("table", "shard", "digest")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    table: str
    shard: int
    digest: bytes
    def __init__(self, table: _Optional[str] = ..., shard: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class GetDigestResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardDigest]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardDigest, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("rows", "size_bytes", "candidates", "candidate_bytes", "expired", "evicted", "shards", "smallest_shard", "largest_shard", "index_slots")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SMALLEST_SHARD_FIELD_NUMBER: _ClassVar[int]
    LARGEST_SHARD_FIELD_NUMBER: _ClassVar[int]
    INDEX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    size_bytes: int
    candidates: int
    candidate_bytes: int
    expired: int
    evicted: int
    shards: int
    smallest_shard: int
    largest_shard: int
    index_slots: int
    def __init__(self, rows: _Optional[int] = ..., size_bytes: _Optional[int] = ..., candidates: _Optional[int] = ..., candidate_bytes: _Optional[int] = ..., expired: _Optional[int] = ..., evicted: _Optional[int] = ..., shards: _Optional[int] = ..., smallest_shard: _Optional[int] = ..., largest_shard: _Optional[int] = ..., index_slots: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("version", "progress", "member", "batches", "shard_map_epoch")
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _data_plane_pb2.WorkerProgress
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_data_plane_pb2.WorkerProgress, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    version: int
    progress: _containers.MessageMap[int, _data_plane_pb2.WorkerProgress]
    member: _data_plane_pb2.Member
    batches: int
    shard_map_epoch: int
    def __init__(self, version: _Optional[int] = ..., progress: _Optional[_Mapping[int, _data_plane_pb2.WorkerProgress]] = ..., member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., batches: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Staleness(_message.Message):
    __slots__ = ("counts", "total", "largest")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total: int
    largest: int
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ..., largest: _Optional[int] = ...) -> None: ...

class SaveStatus(_message.Message):
    __slots__ = ("pause_s", "duration_s", "is_over", "number")
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    pause_s: float
    duration_s: float
    is_over: bool
    number: int
    def __init__(self, pause_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., is_over: bool = ..., number: _Optional[int] = ...) -> None: ...

class StoreStatus(_message.Message):
    __slots__ = ("version", "tables", "examples", "left", "staleness", "progress", "last_save", "duplicates", "lost", "batches", "silent_s", "lease_s", "awaited")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TableStatus
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TableStatus, _Mapping]] = ...) -> None: ...
    class ExamplesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _data_plane_pb2.WorkerProgress
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_data_plane_pb2.WorkerProgress, _Mapping]] = ...) -> None: ...
    class SilentSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LAST_SAVE_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    version: int
    tables: _containers.MessageMap[str, TableStatus]
    examples: _containers.ScalarMap[int, int]
    left: _containers.RepeatedScalarFieldContainer[int]
    staleness: Staleness
    progress: _containers.MessageMap[int, _data_plane_pb2.WorkerProgress]
    last_save: SaveStatus
    duplicates: int
    lost: _containers.RepeatedScalarFieldContainer[int]
    batches: int
    silent_s: _containers.ScalarMap[int, float]
    lease_s: float
    awaited: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., tables: _Optional[_Mapping[str, TableStatus]] = ..., examples: _Optional[_Mapping[int, int]] = ..., left: _Optional[_Iterable[int]] = ..., staleness: _Optional[_Union[Staleness, _Mapping]] = ..., progress: _Optional[_Mapping[int, _data_plane_pb2.WorkerProgress]] = ..., last_save: _Optional[_Union[SaveStatus, _Mapping]] = ..., duplicates: _Optional[int] = ..., lost: _Optional[_Iterable[int]] = ..., batches: _Optional[int] = ..., silent_s: _Optional[_Mapping[int, float]] = ..., lease_s: _Optional[float] = ..., awaited: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("store", "server_index", "num_servers", "stream", "shard_map_epoch", "format")
    STORE_FIELD_NUMBER: _ClassVar[int]
    SERVER_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_SERVERS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    store: StoreStatus
    server_index: int
    num_servers: int
    stream: StreamOffer
    shard_map_epoch: int
    format: int
    def __init__(self, store: _Optional[_Union[StoreStatus, _Mapping]] = ..., server_index: _Optional[int] = ..., num_servers: _Optional[int] = ..., stream: _Optional[_Union[StreamOffer, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ..., format: _Optional[int] = ...) -> None: ...

class StreamOffer(_message.Message):
    __slots__ = ("port", "key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    key: int
    def __init__(self, port: _Optional[int] = ..., key: _Optional[int] = ...) -> None: ...
