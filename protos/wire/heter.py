"""The calls to a heter trainer: request dataclasses, and one row an RPC, as in calls.py.

Decoded arrays are read-only views of the message.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.store import Member, ReduceOp
from ctr_ps.protos.v1 import heter_trainer_pb2
from ctr_ps.protos.wire.calls import Call, Deadline, call_of
from ctr_ps.protos.wire.encoding.arrays import encode_array
from ctr_ps.protos.wire.encoding.codec import FieldCodec, no_fields, record

LayerOutputs = Mapping[str, Sequence[NDArray[Any]]]
"""Arrays by layer: float32, bool, int32 or int64."""

_DTYPES = {"float32": "<f4", "bool": "?", "int32": "<i4", "int64": "<i8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """A batch of B examples of a worker, after the layers before the cut, and the outputs of those.

    `number` counts the member's batches; the answers to all before `settled` have arrived.
    """

    member: Member
    number: int
    settled: int
    dense: Values  # [B, num_dense]
    labels: Values  # [B], of T labels [B, T]
    outputs: LayerOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Answer of a heter trainer to a batch: probabilities of a click, and gradients of the loss.

    The loss is summed over the examples, and not finite if the gradients are not. These have the shapes of
    the outputs; float32[0] where there is none.
    """

    loss: float
    probabilities: Values  # [B]
    grads: LayerOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Announcement of a worker's barrier or, with `op`, of an all-reduce of `size` numbers.

    `number` is that of the barrier in the job.
    """

    member: Member
    number: int
    name: str
    size: int = 0
    op: ReduceOp | None = None


def _encode_tensor(array: NDArray[Any]) -> dict[str, Any]:
    name = array.dtype.name
    return {
        "dtype": name,
        "shape": array.shape,
        "data": encode_array(array, np.dtype(_DTYPES[name])),
    }


def _decode_tensor(found: Any) -> NDArray[Any]:
    if found.dtype not in _DTYPES:
        raise ProtocolError(f"a tensor is of {found.dtype!r}, expected {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(_DTYPES[found.dtype]), tuple(found.shape)
    if len(found.data) != math.prod(shape) * dtype.itemsize:
        raise ProtocolError(
            f"a tensor of {found.dtype}{list(shape)} has {len(found.data)} bytes, expected "
            f"{math.prod(shape) * dtype.itemsize}"
        )
    if dtype == np.bool_:
        flags = np.frombuffer(found.data, np.uint8).reshape(shape)
        if flags.size and flags.max() > 1:
            raise ProtocolError(f"a tensor of bool has a byte {flags.max()}, expected 0 or 1")
    return np.frombuffer(found.data, dtype).reshape(shape)


def _encode_outputs(outputs: LayerOutputs) -> list[dict[str, Any]]:
    return [
        {"layer": layer, "tensors": [_encode_tensor(each) for each in arrays]}
        for layer, arrays in outputs.items()
    ]


def _decode_outputs(found: Any) -> dict[str, list[NDArray[Any]]]:
    outputs = {each.layer: [_decode_tensor(of) for of in each.tensors] for each in found}
    if len(outputs) < len(found):
        raise ProtocolError(
            f"{len(found)} outputs for the layers {sorted(outputs)}, expected one for each"
        )
    return outputs


_TENSOR = FieldCodec(_encode_tensor, _decode_tensor)
_OUTPUTS = FieldCodec(_encode_outputs, _decode_outputs)
_METHODS = heter_trainer_pb2.DESCRIPTOR.services_by_name["HeterTrainer"].methods_by_name

TRAIN: Call[Train, Trained] = call_of(
    _METHODS["Train"],
    record(Train, dense=_TENSOR, labels=_TENSOR, outputs=_OUTPUTS),
    record(Trained, probabilities=_TENSOR, grads=_OUTPUTS),
    deadline=Deadline.WORKERS,
)
ATTEND: Call[Attend, None] = call_of(
    _METHODS["Attend"], record(Attend), no_fields, deadline=Deadline.WORKERS
)

HETER_CALLS: Mapping[str, Call[Any, Any]] = {call.name: call for call in (TRAIN, ATTEND)}
"""All of them, by name."""
