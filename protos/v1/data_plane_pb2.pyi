from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Missing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISSING_UNSPECIFIED: _ClassVar[Missing]
    MISSING_INITIAL: _ClassVar[Missing]
    MISSING_ZEROS: _ClassVar[Missing]
MISSING_UNSPECIFIED: Missing
MISSING_INITIAL: Missing
MISSING_ZEROS: Missing

class Member(_message.Message):
    __slots__ = ("worker", "incarnation")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PushId(_message.Message):
    __slots__ = ("worker", "incarnation", "sequence", "step", "examples", "batches", "pulled", "position", "weight", "partitions")
    class PartitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    sequence: int
    step: int
    examples: int
    batches: int
    pulled: int
    position: str
    weight: float
    partitions: _containers.ScalarMap[str, str]
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., examples: _Optional[int] = ..., batches: _Optional[int] = ..., pulled: _Optional[int] = ..., position: _Optional[str] = ..., weight: _Optional[float] = ..., partitions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("incarnation", "sequence", "step", "position", "partitions", "sent", "sent_partitions")
    class PartitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SentPartitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    SENT_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    step: int
    position: str
    partitions: _containers.ScalarMap[str, str]
    sent: int
    sent_partitions: _containers.ScalarMap[str, str]
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., step: _Optional[int] = ..., position: _Optional[str] = ..., partitions: _Optional[_Mapping[str, str]] = ..., sent: _Optional[int] = ..., sent_partitions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KeyColumn(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ValueColumn(_message.Message):
    __slots__ = ("table", "values", "num_rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    table: str
    values: bytes
    num_rows: int
    def __init__(self, table: _Optional[str] = ..., values: _Optional[bytes] = ..., num_rows: _Optional[int] = ...) -> None: ...

class PullSparseRequest(_message.Message):
    __slots__ = ("keys", "missing", "at", "shard_map_epoch", "bfloat16")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyColumn]
    missing: Missing
    at: int
    shard_map_epoch: int
    bfloat16: bool
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyColumn, _Mapping]]] = ..., missing: _Optional[_Union[Missing, str]] = ..., at: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class PullSparseResponse(_message.Message):
    __slots__ = ("rows", "version", "bfloat16")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[ValueColumn]
    version: int
    bfloat16: bool
    def __init__(self, rows: _Optional[_Iterable[_Union[ValueColumn, _Mapping]]] = ..., version: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class PullChangedRequest(_message.Message):
    __slots__ = ("tables", "member", "max_rows", "shard_map_epoch", "number")
    TABLES_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedScalarFieldContainer[str]
    member: Member
    max_rows: int
    shard_map_epoch: int
    number: int
    def __init__(self, tables: _Optional[_Iterable[str]] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., max_rows: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ChangedColumn(_message.Message):
    __slots__ = ("table", "keys", "values")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    values: bytes
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class PullChangedResponse(_message.Message):
    __slots__ = ("rows", "version", "has_more")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[ChangedColumn]
    version: int
    has_more: bool
    def __init__(self, rows: _Optional[_Iterable[_Union[ChangedColumn, _Mapping]]] = ..., version: _Optional[int] = ..., has_more: bool = ...) -> None: ...

class SparseGradColumn(_message.Message):
    __slots__ = ("table", "keys", "values", "examples", "counts", "weight")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    values: bytes
    examples: int
    counts: bytes
    weight: float
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ..., examples: _Optional[int] = ..., counts: _Optional[bytes] = ..., weight: _Optional[float] = ...) -> None: ...

class DenseGradColumn(_message.Message):
    __slots__ = ("block", "values", "examples", "start", "weight")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    block: str
    values: bytes
    examples: int
    start: int
    weight: float
    def __init__(self, block: _Optional[str] = ..., values: _Optional[bytes] = ..., examples: _Optional[int] = ..., start: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...

class PushChunk(_message.Message):
    __slots__ = ("sparse", "dense", "chunk", "num_chunks", "bfloat16")
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    sparse: _containers.RepeatedCompositeFieldContainer[SparseGradColumn]
    dense: _containers.RepeatedCompositeFieldContainer[DenseGradColumn]
    chunk: int
    num_chunks: int
    bfloat16: bool
    def __init__(self, sparse: _Optional[_Iterable[_Union[SparseGradColumn, _Mapping]]] = ..., dense: _Optional[_Iterable[_Union[DenseGradColumn, _Mapping]]] = ..., chunk: _Optional[int] = ..., num_chunks: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class PushGradRequest(_message.Message):
    __slots__ = ("push_id", "chunk", "at", "shard_map_epoch")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    push_id: PushId
    chunk: PushChunk
    at: int
    shard_map_epoch: int
    def __init__(self, push_id: _Optional[_Union[PushId, _Mapping]] = ..., chunk: _Optional[_Union[PushChunk, _Mapping]] = ..., at: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class PushGradResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class PullDenseRequest(_message.Message):
    __slots__ = ("blocks", "at", "shard_map_epoch", "bfloat16")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[str]
    at: int
    shard_map_epoch: int
    bfloat16: bool
    def __init__(self, blocks: _Optional[_Iterable[str]] = ..., at: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class DenseColumn(_message.Message):
    __slots__ = ("block", "values")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    block: str
    values: bytes
    def __init__(self, block: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class PullDenseResponse(_message.Message):
    __slots__ = ("pieces", "version", "bfloat16")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    pieces: _containers.RepeatedCompositeFieldContainer[DenseColumn]
    version: int
    bfloat16: bool
    def __init__(self, pieces: _Optional[_Iterable[_Union[DenseColumn, _Mapping]]] = ..., version: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class PushPullRequest(_message.Message):
    __slots__ = ("push", "sparse", "dense")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    push: PushGradRequest
    sparse: PullSparseRequest
    dense: PullDenseRequest
    def __init__(self, push: _Optional[_Union[PushGradRequest, _Mapping]] = ..., sparse: _Optional[_Union[PullSparseRequest, _Mapping]] = ..., dense: _Optional[_Union[PullDenseRequest, _Mapping]] = ...) -> None: ...

class PushPullResponse(_message.Message):
    __slots__ = ("push", "sparse", "dense")
    PUSH_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    push: PushGradResponse
    sparse: PullSparseResponse
    dense: PullDenseResponse
    def __init__(self, push: _Optional[_Union[PushGradResponse, _Mapping]] = ..., sparse: _Optional[_Union[PullSparseResponse, _Mapping]] = ..., dense: _Optional[_Union[PullDenseResponse, _Mapping]] = ...) -> None: ...

class ExchangeMessage(_message.Message):
    __slots__ = ("sender", "receiver", "sequence", "content")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    sender: int
    receiver: int
    sequence: int
    content: bytes
    def __init__(self, sender: _Optional[int] = ..., receiver: _Optional[int] = ..., sequence: _Optional[int] = ..., content: _Optional[bytes] = ...) -> None: ...

class PostRequest(_message.Message):
    __slots__ = ("exchange", "message", "member", "shard_map_epoch")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    exchange: str
    message: ExchangeMessage
    member: Member
    shard_map_epoch: int
    def __init__(self, exchange: _Optional[str] = ..., message: _Optional[_Union[ExchangeMessage, _Mapping]] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class PostResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeRequest(_message.Message):
    __slots__ = ("exchange", "member", "received", "shard_map_epoch")
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    exchange: str
    member: Member
    received: int
    shard_map_epoch: int
    def __init__(self, exchange: _Optional[str] = ..., member: _Optional[_Union[Member, _Mapping]] = ..., received: _Optional[int] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class TakeResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ExchangeMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ExchangeMessage, _Mapping]]] = ...) -> None: ...

class RowStateColumn(_message.Message):
    __slots__ = ("table", "keys", "weights", "state", "optimizer")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: bytes
    weights: bytes
    state: bytes
    optimizer: str
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., state: _Optional[bytes] = ..., optimizer: _Optional[str] = ...) -> None: ...

class BlockStateColumn(_message.Message):
    __slots__ = ("block", "start", "weights", "element_state", "scalars", "num_states", "optimizer")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_STATE_FIELD_NUMBER: _ClassVar[int]
    SCALARS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    block: str
    start: int
    weights: bytes
    element_state: bytes
    scalars: bytes
    num_states: int
    optimizer: str
    def __init__(self, block: _Optional[str] = ..., start: _Optional[int] = ..., weights: _Optional[bytes] = ..., element_state: _Optional[bytes] = ..., scalars: _Optional[bytes] = ..., num_states: _Optional[int] = ..., optimizer: _Optional[str] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("rows", "blocks", "chunk", "num_chunks")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowStateColumn]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockStateColumn]
    chunk: int
    num_chunks: int
    def __init__(self, rows: _Optional[_Iterable[_Union[RowStateColumn, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockStateColumn, _Mapping]]] = ..., chunk: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("block", "start", "stop")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    block: str
    start: int
    stop: int
    def __init__(self, block: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class PullStateRequest(_message.Message):
    __slots__ = ("keys", "stretches", "shard_map_epoch")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyColumn]
    stretches: _containers.RepeatedCompositeFieldContainer[Stretch]
    shard_map_epoch: int
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyColumn, _Mapping]]] = ..., stretches: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class PullStateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: StateChunk
    def __init__(self, state: _Optional[_Union[StateChunk, _Mapping]] = ...) -> None: ...

class PushStateRequest(_message.Message):
    __slots__ = ("push_id", "chunk", "shard_map_epoch")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    push_id: PushId
    chunk: StateChunk
    shard_map_epoch: int
    def __init__(self, push_id: _Optional[_Union[PushId, _Mapping]] = ..., chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., shard_map_epoch: _Optional[int] = ...) -> None: ...

class PushStateResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
