from ctr_ps.protos.v1 import data_plane_pb2 as _data_plane_pb2
from ctr_ps.protos.v1 import spec_pb2 as _spec_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_HOLD: _ClassVar[Phase]
    PHASE_DRAIN: _ClassVar[Phase]
    PHASE_CLOSE: _ClassVar[Phase]
    PHASE_RELEASE: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_HOLD: Phase
PHASE_DRAIN: Phase
PHASE_CLOSE: Phase
PHASE_RELEASE: Phase

class ShardMap(_message.Message):
    __slots__ = ("epoch", "servers", "owners", "endpoints")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    servers: _containers.RepeatedScalarFieldContainer[int]
    owners: _containers.RepeatedScalarFieldContainer[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, epoch: _Optional[int] = ..., servers: _Optional[_Iterable[int]] = ..., owners: _Optional[_Iterable[int]] = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class GetMapRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMapResponse(_message.Message):
    __slots__ = ("shard_map", "server", "members", "move", "last_move", "tables", "blocks", "rows", "has_update_log", "row_bytes", "accesses")
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    LAST_MOVE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    HAS_UPDATE_LOG_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCESSES_FIELD_NUMBER: _ClassVar[int]
    shard_map: ShardMap
    server: int
    members: str
    move: str
    last_move: str
    tables: _containers.RepeatedCompositeFieldContainer[_spec_pb2.TableSpec]
    blocks: _containers.RepeatedCompositeFieldContainer[_spec_pb2.DenseSpec]
    rows: _containers.RepeatedScalarFieldContainer[int]
    has_update_log: bool
    row_bytes: _containers.RepeatedScalarFieldContainer[int]
    accesses: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, shard_map: _Optional[_Union[ShardMap, _Mapping]] = ..., server: _Optional[int] = ..., members: _Optional[str] = ..., move: _Optional[str] = ..., last_move: _Optional[str] = ..., tables: _Optional[_Iterable[_Union[_spec_pb2.TableSpec, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[_spec_pb2.DenseSpec, _Mapping]]] = ..., rows: _Optional[_Iterable[int]] = ..., has_update_log: bool = ..., row_bytes: _Optional[_Iterable[int]] = ..., accesses: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginMoveRequest(_message.Message):
    __slots__ = ("token", "shard_map")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    token: str
    shard_map: ShardMap
    def __init__(self, token: _Optional[str] = ..., shard_map: _Optional[_Union[ShardMap, _Mapping]] = ...) -> None: ...

class BeginMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeMovedRequest(_message.Message):
    __slots__ = ("token", "number", "max_bytes", "with_counts", "server")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WITH_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    token: str
    number: int
    max_bytes: int
    with_counts: bool
    server: int
    def __init__(self, token: _Optional[str] = ..., number: _Optional[int] = ..., max_bytes: _Optional[int] = ..., with_counts: bool = ..., server: _Optional[int] = ...) -> None: ...

class MovedRows(_message.Message):
    __slots__ = ("table", "keys", "weights", "state", "statistics", "removed", "are_candidates")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ARE_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    weights: bytes
    state: bytes
    statistics: bytes
    removed: bytes
    are_candidates: bool
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., state: _Optional[bytes] = ..., statistics: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., are_candidates: bool = ...) -> None: ...

class MovedCounters(_message.Message):
    __slots__ = ("table", "shard", "counters", "start")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    table: str
    shard: int
    counters: bytes
    start: int
    def __init__(self, table: _Optional[str] = ..., shard: _Optional[int] = ..., counters: _Optional[bytes] = ..., start: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("rows", "blocks", "counters")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[MovedRows]
    blocks: _containers.RepeatedCompositeFieldContainer[_data_plane_pb2.BlockStateColumn]
    counters: _containers.RepeatedCompositeFieldContainer[MovedCounters]
    def __init__(self, rows: _Optional[_Iterable[_Union[MovedRows, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[_data_plane_pb2.BlockStateColumn, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[MovedCounters, _Mapping]]] = ...) -> None: ...

class TakeMovedResponse(_message.Message):
    __slots__ = ("moved", "is_all")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    IS_ALL_FIELD_NUMBER: _ClassVar[int]
    moved: Moved
    is_all: bool
    def __init__(self, moved: _Optional[_Union[Moved, _Mapping]] = ..., is_all: bool = ...) -> None: ...

class PutMovedRequest(_message.Message):
    __slots__ = ("token", "number", "moved")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    token: str
    number: int
    moved: Moved
    def __init__(self, token: _Optional[str] = ..., number: _Optional[int] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class PutMovedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SeenPushes(_message.Message):
    __slots__ = ("incarnation", "pushes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    pushes: int
    def __init__(self, incarnation: _Optional[int] = ..., pushes: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("step", "seen", "completed")
    class SeenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: SeenPushes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[SeenPushes, _Mapping]] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    step: int
    seen: _containers.MessageMap[int, SeenPushes]
    completed: str
    def __init__(self, step: _Optional[int] = ..., seen: _Optional[_Mapping[int, SeenPushes]] = ..., completed: _Optional[str] = ...) -> None: ...

class HoldMoveRequest(_message.Message):
    __slots__ = ("token", "phase", "cut", "number")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    token: str
    phase: Phase
    cut: Cut
    number: int
    def __init__(self, token: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class HoldMoveResponse(_message.Message):
    __slots__ = ("cut",)
    CUT_FIELD_NUMBER: _ClassVar[int]
    cut: Cut
    def __init__(self, cut: _Optional[_Union[Cut, _Mapping]] = ...) -> None: ...

class GetJobStateRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("kind", "payload")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    kind: str
    payload: bytes
    def __init__(self, kind: _Optional[str] = ..., payload: _Optional[bytes] = ...) -> None: ...

class GetJobStateResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ...) -> None: ...

class PrepareMoveRequest(_message.Message):
    __slots__ = ("token", "server", "records", "progress")
    class ProgressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _data_plane_pb2.WorkerProgress
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_data_plane_pb2.WorkerProgress, _Mapping]] = ...) -> None: ...
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    token: str
    server: int
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    progress: _containers.MessageMap[int, _data_plane_pb2.WorkerProgress]
    def __init__(self, token: _Optional[str] = ..., server: _Optional[int] = ..., records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ..., progress: _Optional[_Mapping[int, _data_plane_pb2.WorkerProgress]] = ...) -> None: ...

class PrepareMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndMoveRequest(_message.Message):
    __slots__ = ("token", "is_committed", "epoch")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    token: str
    is_committed: bool
    epoch: int
    def __init__(self, token: _Optional[str] = ..., is_committed: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class EndMoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
