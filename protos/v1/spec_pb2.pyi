from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "params")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    params: _containers.RepeatedCompositeFieldContainer[HyperParameter]
    def __init__(self, name: _Optional[str] = ..., params: _Optional[_Iterable[_Union[HyperParameter, _Mapping]]] = ...) -> None: ...

class HyperParameter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class InitializerSpec(_message.Message):
    __slots__ = ("kind", "scale")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    scale: float
    def __init__(self, kind: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "initializer", "optimizer", "seed", "num_shards", "records_changes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_CHANGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    initializer: InitializerSpec
    optimizer: OptimizerSpec
    seed: int
    num_shards: int
    records_changes: bool
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., initializer: _Optional[_Union[InitializerSpec, _Mapping]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., seed: _Optional[int] = ..., num_shards: _Optional[int] = ..., records_changes: bool = ...) -> None: ...

class DenseSegment(_message.Message):
    __slots__ = ("length", "initializer")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    length: int
    initializer: InitializerSpec
    def __init__(self, length: _Optional[int] = ..., initializer: _Optional[_Union[InitializerSpec, _Mapping]] = ...) -> None: ...

class DenseSpec(_message.Message):
    __slots__ = ("name", "segments", "optimizer", "seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    segments: _containers.RepeatedCompositeFieldContainer[DenseSegment]
    optimizer: OptimizerSpec
    seed: int
    def __init__(self, name: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[DenseSegment, _Mapping]]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...
