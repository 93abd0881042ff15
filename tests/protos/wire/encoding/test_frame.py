"""Frames: what protobuf reads of them is what was written, whatever has columns."""

import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.v1 import data_plane_pb2
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.protos.wire.encoding.frame import Frame

TYPES = {
    codec.message.DESCRIPTOR.full_name: codec.message.DESCRIPTOR
    for call in CALLS.values()
    for codec in (call.request, call.answer)
}


def value_of(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_BYTES:
            return memoryview(rng.randbytes(rng.choice([0, 1, 127, 128, 20_000])))
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(["", "t", "table"])
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return float(rng.randrange(100))
        case FieldDescriptor.TYPE_ENUM:
            return rng.choice([each.number for each in field.enum_type.values])
        case FieldDescriptor.TYPE_MESSAGE:
            return fields_of(field.message_type, rng)
    return rng.randrange(100)


def fields_of(message: Descriptor, rng: random.Random) -> dict[str, Any]:
    fields = {}
    for field in message.fields:
        is_map = field.message_type and field.message_type.GetOptions().map_entry
        if is_map or rng.random() < 0.2:
            continue
        number = rng.choice([0, 1, 3]) if field.is_repeated else 1
        values = [value_of(field, rng) for _ in range(number)]
        if field.is_repeated and field.type == FieldDescriptor.TYPE_BYTES:
            values = [bytes(value) for value in values]
        fields[field.name] = values if field.is_repeated else values[0]
    return fields


def as_protobuf(message: Descriptor, fields: dict[str, Any]) -> Message:
    """Returns the message that protobuf makes of fields."""

    def plain(value: Any) -> Any:
        match value:
            case memoryview():
                return bytes(value)
            case dict():
                return {name: plain(each) for name, each in value.items()}
            case list():
                return [plain(each) for each in value]
        return value

    return GetMessageClass(message)(**plain(fields))


@pytest.mark.parametrize("message", TYPES.values(), ids=TYPES)
def test_frame_is_the_message_that_protobuf_makes(message: Descriptor) -> None:
    frame, rng = Frame(message), random.Random(message.full_name)
    for _ in range(30):
        fields = fields_of(message, rng)

        found = GetMessageClass(message).FromString(frame.bytes_of(fields))

        assert found == as_protobuf(message, fields)


@given(length=st.integers(0, 70_000))
def test_column_of_any_length_is_framed(length: int) -> None:
    column = data_plane_pb2.DenseColumn
    values = np.arange(length, dtype=np.uint8)

    found = column.FromString(Frame(column.DESCRIPTOR).bytes_of({"values": values.data}))

    assert found == column(values=values.tobytes())
