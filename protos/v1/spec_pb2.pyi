from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScheduleSpec(_message.Message):
    __slots__ = ("kind", "warmup_steps", "total_steps", "end_factor", "step_size", "gamma")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    END_FACTOR_FIELD_NUMBER: _ClassVar[int]
    STEP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    kind: str
    warmup_steps: int
    total_steps: int
    end_factor: float
    step_size: int
    gamma: float
    def __init__(self, kind: _Optional[str] = ..., warmup_steps: _Optional[int] = ..., total_steps: _Optional[int] = ..., end_factor: _Optional[float] = ..., step_size: _Optional[int] = ..., gamma: _Optional[float] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "params", "schedule")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: _containers.ScalarMap[str, float]
    schedule: ScheduleSpec
    def __init__(self, name: _Optional[str] = ..., params: _Optional[_Mapping[str, float]] = ..., schedule: _Optional[_Union[ScheduleSpec, _Mapping]] = ...) -> None: ...

class InitializerSpec(_message.Message):
    __slots__ = ("kind", "scale")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    scale: float
    def __init__(self, kind: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class StatisticsSpec(_message.Message):
    __slots__ = ("nonclk_coeff", "click_coeff", "decay")
    NONCLK_COEFF_FIELD_NUMBER: _ClassVar[int]
    CLICK_COEFF_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    nonclk_coeff: float
    click_coeff: float
    decay: float
    def __init__(self, nonclk_coeff: _Optional[float] = ..., click_coeff: _Optional[float] = ..., decay: _Optional[float] = ...) -> None: ...

class AdmissionSpec(_message.Message):
    __slots__ = ("policy", "threshold", "table", "counter", "expected_keys", "false_positive_rate", "default_value")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_KEYS_FIELD_NUMBER: _ClassVar[int]
    FALSE_POSITIVE_RATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    policy: str
    threshold: float
    table: str
    counter: str
    expected_keys: int
    false_positive_rate: float
    default_value: float
    def __init__(self, policy: _Optional[str] = ..., threshold: _Optional[float] = ..., table: _Optional[str] = ..., counter: _Optional[str] = ..., expected_keys: _Optional[int] = ..., false_positive_rate: _Optional[float] = ..., default_value: _Optional[float] = ...) -> None: ...

class ExpirySpec(_message.Message):
    __slots__ = ("delete_threshold", "max_unseen", "ttl_s", "max_rows", "max_bytes", "evict")
    DELETE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_UNSEEN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    delete_threshold: float
    max_unseen: int
    ttl_s: float
    max_rows: int
    max_bytes: int
    evict: str
    def __init__(self, delete_threshold: _Optional[float] = ..., max_unseen: _Optional[int] = ..., ttl_s: _Optional[float] = ..., max_rows: _Optional[int] = ..., max_bytes: _Optional[int] = ..., evict: _Optional[str] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "initializer", "optimizer", "seed", "num_shards", "records_changes", "statistics", "admission", "expiry", "is_bfloat16")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_CHANGES_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    IS_BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    initializer: InitializerSpec
    optimizer: OptimizerSpec
    seed: int
    num_shards: int
    records_changes: bool
    statistics: StatisticsSpec
    admission: AdmissionSpec
    expiry: ExpirySpec
    is_bfloat16: bool
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., initializer: _Optional[_Union[InitializerSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., seed: _Optional[int] = ..., num_shards: _Optional[int] = ..., records_changes: bool = ..., statistics: _Optional[_Union[StatisticsSpec, _Mapping]] = ..., admission: _Optional[_Union[AdmissionSpec, _Mapping]] = ..., expiry: _Optional[_Union[ExpirySpec, _Mapping]] = ..., is_bfloat16: bool = ...) -> None: ...

class DenseSegment(_message.Message):
    __slots__ = ("length", "initializer", "name", "shape", "values")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    length: int
    initializer: InitializerSpec
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, length: _Optional[int] = ..., initializer: _Optional[_Union[InitializerSpec, _Mapping]] = ..., name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class DenseSpec(_message.Message):
    __slots__ = ("name", "segments", "optimizer", "seed", "values_digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    VALUES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    segments: _containers.RepeatedCompositeFieldContainer[DenseSegment]
    optimizer: OptimizerSpec
    seed: int
    values_digest: int
    def __init__(self, name: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[DenseSegment, _Mapping]]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., seed: _Optional[int] = ..., values_digest: _Optional[int] = ...) -> None: ...
