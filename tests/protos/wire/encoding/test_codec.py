"""Dataclasses to messages and back: nothing is lost on the way, and what does not agree is refused.

And frames: what protobuf reads of them is what was written, whatever has columns.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_SEGMENTS
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    ScheduleSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import (
    SaveStatus,
    ServerStatus,
    Staleness,
    StoreStatus,
    TableStatus,
    WorkerProgress,
)
from ctr_ps.protos.v1 import data_plane_pb2, parameter_server_pb2
from ctr_ps.protos.wire.calls import ALL_REDUCE, CALLS, CREATE_DENSE, CREATE_TABLE, GET_STATUS, SAVE
from ctr_ps.protos.wire.encoding.codec import Frame, record, value
from ctr_ps.protos.wire.requests import CreateDense, CreateTable
from tests.support.local_transport import through

NAMES = st.text(min_size=1, max_size=20)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
STALENESS = st.builds(
    Staleness, counts=st.lists(UINT64, max_size=9).map(tuple), total=UINT64, largest=UINT64
)
WORKERS = st.dictionaries(st.integers(0, 9), UINT64, max_size=5)
PROGRESS = st.dictionaries(
    st.integers(0, 9),
    st.builds(WorkerProgress, incarnation=UINT64, sequence=UINT64, step=UINT64, position=st.text()),
    max_size=5,
)
TABLES = st.builds(
    TableStatus,
    rows=UINT64,
    size_bytes=UINT64,
    candidates=UINT64,
    candidate_bytes=UINT64,
    shards=UINT64,
    smallest_shard=UINT64,
    largest_shard=UINT64,
    index_slots=UINT64,
)
STATUSES = st.builds(
    lambda version, tables, examples, done, staleness, progress, last_save, silent, lease: (
        StoreStatus(
            version=version,
            tables=tables,
            examples=examples,
            left=frozenset(done),
            staleness=staleness,
            progress=progress,
            last_save=last_save,
            silent_s=silent,
            lease_s=lease,
        )
    ),
    UINT64,
    st.dictionaries(NAMES, TABLES, max_size=4),
    WORKERS,
    st.sets(st.integers(0, 9)),
    STALENESS,
    PROGRESS,
    st.none()
    | st.builds(
        SaveStatus,
        pause_s=st.floats(0, 1e9),
        duration_s=st.floats(0, 1e9),
        is_over=st.booleans(),
        number=UINT64,
    ),
    st.dictionaries(st.integers(0, 9), st.floats(0), max_size=5),
    st.none() | st.floats(0, 1e9),
)


@given(status=STATUSES)
def test_status_survives_the_wire(status: StoreStatus) -> None:
    server = ServerStatus(status, 2, 3)

    received = through(GET_STATUS.answer, server)

    assert received == server
    assert received.store.silent_s == status.silent_s


@pytest.mark.parametrize("op", [0, 9])
def test_unknown_names_of_an_enum_are_refused(op: int) -> None:
    message = parameter_server_pb2.AllReduceRequest(
        name="end",
        member={"worker": 0},  # type: ignore[arg-type]
        op=op,  # type: ignore[arg-type]
    )

    with pytest.raises(ProtocolError, match=rf"AllReduceRequest\.op is {op}, expected .* SUM, MAX"):
        ALL_REDUCE.request.decode(message.SerializeToString())


@pytest.mark.parametrize("dtype", ["", "float64"])
def test_unknown_words_are_refused(dtype: str) -> None:
    message = parameter_server_pb2.SaveRequest(inference={"dtype": dtype}, member={"worker": 0})

    with pytest.raises(ProtocolError, match=rf"Inference\.dtype is '{dtype}', expected .* float16"):
        SAVE.request.decode(message.SerializeToString())


NUMBERS = st.floats(allow_nan=False)
INITIALIZERS = st.builds(InitializerSpec, kind=NAMES, scale=NUMBERS)
SCHEDULES = st.builds(
    ScheduleSpec,
    kind=NAMES,
    warmup_steps=UINT64,
    total_steps=UINT64,
    end_factor=NUMBERS,
    step_size=UINT64,
    gamma=NUMBERS,
)
OPTIMIZERS = st.builds(
    OptimizerSpec,
    name=NAMES,
    params=st.dictionaries(NAMES, NUMBERS),
    schedule=st.none() | SCHEDULES,
)
STATISTICS = st.builds(StatisticsSpec, nonclk_coeff=NUMBERS, click_coeff=NUMBERS, decay=NUMBERS)
ADMISSIONS = st.builds(
    AdmissionSpec,
    policy=NAMES,
    threshold=NUMBERS,
    table=NAMES,
    counter=NAMES,
    expected_keys=UINT64,
    false_positive_rate=NUMBERS,
    default_value=NUMBERS,
)
EXPIRIES = st.builds(
    ExpirySpec,
    delete_threshold=NUMBERS,
    max_unseen=UINT64,
    ttl_s=NUMBERS,
    max_rows=UINT64,
    max_bytes=UINT64,
    evict=NAMES,
)
TABLE_SPECS = st.builds(
    TableSpec,
    name=NAMES,
    dim=UINT32,
    initializer=INITIALIZERS,
    optimizer=OPTIMIZERS,
    is_bfloat16=st.booleans(),
    seed=UINT64,
    num_shards=UINT32,
    records_changes=st.booleans(),
    statistics=st.none() | STATISTICS,
    admission=st.none() | ADMISSIONS,
    expiry=st.none() | EXPIRIES,
)
DENSE_SPECS = st.builds(
    DenseSpec,
    name=NAMES,
    segments=st.lists(
        st.builds(DenseSegment, length=UINT64, initializer=INITIALIZERS), max_size=4
    ).map(tuple),
    optimizer=OPTIMIZERS,
    seed=UINT64,
    values_digest=UINT64,
)


@given(spec=TABLE_SPECS)
def test_table_spec_survives_the_wire(spec: TableSpec) -> None:
    declared = CreateTable(spec=spec, shard_map_epoch=3)
    assert through(CREATE_TABLE.request, declared) == declared


@given(spec=DENSE_SPECS)
def test_dense_spec_survives_the_wire(spec: DenseSpec) -> None:
    assert through(CREATE_DENSE.request, CreateDense(spec=spec)) == CreateDense(spec=spec)


def test_dense_block_of_too_many_segments_is_not_decoded() -> None:
    segment = DenseSegment(length=1, initializer=InitializerSpec())
    spec = DenseSpec(
        name="d", segments=(segment,) * (MAX_SEGMENTS + 1), optimizer=OptimizerSpec(name="sgd")
    )

    with pytest.raises(ProtocolError, match=f"segments has {MAX_SEGMENTS + 1} elements"):
        through(CREATE_DENSE.request, CreateDense(spec=spec))


def test_given_values_of_a_dense_block_survive_the_wire() -> None:
    spec = DenseSpec(name="d", segments=(), optimizer=OptimizerSpec(name="sgd"), values_digest=7)
    values = np.float32([0.5, -1e-30])

    found = through(CREATE_DENSE.request, CreateDense(spec=spec, values=values))

    np.testing.assert_array_equal(found.values, values)


@dataclass
class Numbered:
    number: int
    wanted: int


@dataclass
class Wanted:
    """Its message has `version` without `optional`."""

    version: int | None


@dataclass
class Unknown:
    version: complex


@pytest.mark.parametrize(
    ("unlike", "problem"),
    [
        (Numbered, r"fields \['number', 'wanted'\], .*WaitVersionResponse has \['version'\]"),
        (Wanted, "WaitVersionResponse.version is not optional"),
        (Unknown, "WaitVersionResponse.version: no codec for .*complex"),
    ],
)
def test_dataclass_unlike_its_message_is_refused(unlike: type, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        record(unlike)(parameter_server_pb2.WaitVersionResponse.DESCRIPTOR)


def test_value_is_the_only_field_of_its_message() -> None:
    with pytest.raises(TypeError, match=r"BarrierResponse has \['version'\]"):
        value("slowest", int)(parameter_server_pb2.BarrierResponse.DESCRIPTOR)


def test_value_that_is_not_there_is_refused() -> None:
    with pytest.raises(ProtocolError, match="CreateTableRequest has no spec"):
        CREATE_TABLE.request.decode(b"")


MESSAGES = {
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


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
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
