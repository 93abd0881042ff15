"""Batches on their way to a heter trainer: what goes in comes out, and what does not fit is refused."""

from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.store import Member, ReduceOp
from ctr_ps.protos.v1 import heter_trainer_pb2
from ctr_ps.protos.wire.heter import ATTEND, HETER_CALLS, TRAIN, Attend, Train, Trained
from tests.support.local_transport import through


def batch_with(*outputs: Any) -> Train:
    return Train(
        member=Member(1, 2**60),
        number=3,
        settled=1,
        dense=np.arange(6, dtype=np.float32).reshape(2, 3),
        labels=np.ones(2, np.float32),
        outputs={"embedding": list(outputs), "wide.rows": []},
    )


def test_every_rpc_of_the_service_has_a_row() -> None:
    service = heter_trainer_pb2.DESCRIPTOR.services_by_name["HeterTrainer"]

    assert {method.name for method in service.methods} == HETER_CALLS.keys()


def test_tensors_keep_shape_type_and_bits() -> None:
    outputs = [
        np.array([[[np.nan, -0.0, np.inf]]], np.float32),
        np.zeros((2, 3, 0, 4), np.float32),
        np.array([[True], [False]]),
        np.array([-1, 2**31 - 1], np.int32),
        np.array([[-(2**62)]], np.int64),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
    ]

    found = through(TRAIN.request, batch_with(*outputs))

    assert found.member == Member(1, 2**60)
    for output, expected in zip(found.outputs["embedding"], outputs, strict=True):
        assert (output.dtype, output.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(output, expected)
        assert not output.flags.writeable
    answer = Trained(loss=np.inf, probabilities=outputs[5], grads={"a": [np.empty(0, np.float32)]})
    assert through(TRAIN.answer, answer).grads["a"][0].shape == (0,)
    barrier = Attend(member=Member(0, 1), number=4, name="end", size=2, op=ReduceOp.MIN)
    assert through(ATTEND.request, barrier) == barrier


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dtype": "float64", "shape": [1], "data": bytes(8)}, "a tensor is of 'float64'"),
        (
            {"dtype": "float32", "shape": [2], "data": bytes(4)},
            r"float32\[2\] has 4 bytes, expected 8",
        ),
        (
            {"dtype": "float32", "shape": [2**31, 2**31, 2**31], "data": b""},
            "has 0 bytes, expected",
        ),
        ({"dtype": "bool", "shape": [2], "data": b"\x01\x02"}, "has a byte 2, expected 0 or 1"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(tensor: Any, message: str) -> None:
    request = TRAIN.request.message.FromString(TRAIN.request.encode(batch_with()))
    request.dense.CopyFrom(heter_trainer_pb2.Tensor(**tensor))

    with pytest.raises(ProtocolError, match=message):
        TRAIN.request.decode(request.SerializeToString())


def test_outputs_of_one_layer_twice_are_refused() -> None:
    request = TRAIN.request.message.FromString(TRAIN.request.encode(batch_with()))
    request.outputs.add(layer="embedding")

    with pytest.raises(ProtocolError, match="3 outputs for the layers"):
        TRAIN.request.decode(request.SerializeToString())
