from ctr_ps.protos.v1 import data_plane_pb2 as _data_plane_pb2
from ctr_ps.protos.v1 import parameter_server_pb2 as _parameter_server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class LayerOutput(_message.Message):
    __slots__ = ("layer", "tensors")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    layer: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, layer: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class TrainRequest(_message.Message):
    __slots__ = ("member", "number", "settled", "dense", "labels", "outputs")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    number: int
    settled: int
    dense: Tensor
    labels: Tensor
    outputs: _containers.RepeatedCompositeFieldContainer[LayerOutput]
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., number: _Optional[int] = ..., settled: _Optional[int] = ..., dense: _Optional[_Union[Tensor, _Mapping]] = ..., labels: _Optional[_Union[Tensor, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[LayerOutput, _Mapping]]] = ...) -> None: ...

class TrainResponse(_message.Message):
    __slots__ = ("loss", "probabilities", "grads")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    GRADS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    probabilities: Tensor
    grads: _containers.RepeatedCompositeFieldContainer[LayerOutput]
    def __init__(self, loss: _Optional[float] = ..., probabilities: _Optional[_Union[Tensor, _Mapping]] = ..., grads: _Optional[_Iterable[_Union[LayerOutput, _Mapping]]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("member", "number", "name", "size", "op")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    member: _data_plane_pb2.Member
    number: int
    name: str
    size: int
    op: _parameter_server_pb2.ReduceOp
    def __init__(self, member: _Optional[_Union[_data_plane_pb2.Member, _Mapping]] = ..., number: _Optional[int] = ..., name: _Optional[str] = ..., size: _Optional[int] = ..., op: _Optional[_Union[_parameter_server_pb2.ReduceOp, str]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
