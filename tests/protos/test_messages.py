"""Dataclasses to messages and back: nothing is lost on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import messages
from protos.errors import ProtocolError
from protos.gradients import DenseGrad, SparseGrad
from protos.parts import PushPart
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.staleness import Staleness
from protos.store import Missing, Pulled, Reduced, ReduceOp, Stamp, StoreStatus, TableStatus
from protos.v1 import control_plane_pb2, data_plane_pb2, spec_pb2

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats(allow_nan=False)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)

INITIALIZERS = st.builds(InitializerSpec, kind=NAMES, scale=NUMBERS)
OPTIMIZERS = st.builds(OptimizerSpec, name=NAMES, params=st.dictionaries(NAMES, NUMBERS))
TABLE_SPECS = st.builds(
    TableSpec,
    name=NAMES,
    dim=UINT32,
    initializer=INITIALIZERS,
    optimizer=OPTIMIZERS,
    seed=UINT64,
    num_shards=UINT32,
)
DENSE_SPECS = st.builds(
    DenseSpec,
    name=NAMES,
    segments=st.lists(
        st.builds(DenseSegment, length=UINT64, initializer=INITIALIZERS), max_size=4
    ).map(tuple),
    optimizer=OPTIMIZERS,
    seed=UINT64,
)
STAMPS = st.builds(
    Stamp,
    worker=UINT32,
    incarnation=UINT64,
    sequence=UINT64,
    step=UINT64,
    examples=UINT64,
    batches=UINT64,
    pulled=UINT64,
)
STALENESS = st.builds(
    Staleness, counts=st.lists(UINT64, max_size=9).map(tuple), total=UINT64, largest=UINT64
)
WORKERS = st.dictionaries(st.integers(0, 9), UINT64, max_size=5)
STATUSES = st.builds(
    lambda version, tables, examples, done, staleness: StoreStatus(
        version=version,
        tables=tables,
        examples=examples,
        done=frozenset(done) & examples.keys(),
        staleness=staleness,
    ),
    UINT64,
    st.dictionaries(NAMES, st.builds(TableStatus, rows=UINT64, size_bytes=UINT64), max_size=4),
    WORKERS,
    st.sets(st.integers(0, 9)),
    STALENESS,
)


@given(spec=TABLE_SPECS)
def test_table_spec_survives_the_wire(spec: TableSpec) -> None:
    data = messages.table_spec_to_message(spec).SerializeToString()

    assert messages.table_spec_from_message(spec_pb2.TableSpec.FromString(data)) == spec


@given(spec=DENSE_SPECS)
def test_dense_spec_survives_the_wire(spec: DenseSpec) -> None:
    data = messages.dense_spec_to_message(spec).SerializeToString()

    assert messages.dense_spec_from_message(spec_pb2.DenseSpec.FromString(data)) == spec


@given(stamp=STAMPS)
def test_stamp_survives_the_wire(stamp: Stamp) -> None:
    data = messages.stamp_to_message(stamp).SerializeToString()

    assert messages.stamp_from_message(data_plane_pb2.Stamp.FromString(data)) == stamp


@given(status=STATUSES)
def test_status_survives_the_wire(status: StoreStatus) -> None:
    data = messages.status_to_message(status, 0, 1).SerializeToString()

    message = control_plane_pb2.GetStatusResponse.FromString(data)
    assert messages.status_from_message(message) == status


def test_status_names_its_server() -> None:
    status = StoreStatus(version=0, tables={}, examples={}, done=frozenset(), staleness=Staleness())

    message = messages.status_to_message(status, 2, 3)

    assert (message.server_index, message.num_servers) == (2, 3)


@pytest.mark.parametrize("missing", Missing)
@pytest.mark.parametrize("at", [None, 0, 7])
def test_pull_request_says_what_is_missing_and_which_version(
    missing: Missing, at: int | None
) -> None:
    """Version 0 is a version, not the absence of one."""
    keys = {"wide": np.array([1, 2**64 - 1], np.uint64), "deep": np.zeros(0, np.uint64)}

    request = messages.pull_sparse_request(keys, missing, at)

    columns, got_missing, got_at = messages.pull_sparse_arguments(request)
    assert {name: column.tolist() for name, column in columns.items()} == {
        "wide": [1, 2**64 - 1],
        "deep": [],
    }
    assert (got_missing, got_at) == (missing, at)


def test_pull_request_that_does_not_say_what_is_missing_is_refused() -> None:
    with pytest.raises(ProtocolError, match="what missing keys read"):
        messages.pull_sparse_arguments(data_plane_pb2.PullSparseRequest())


def test_pulled_rows_have_the_shape_that_was_asked_for() -> None:
    rows = {"wide": np.ones((3, 1), np.float32), "deep": np.ones((2, 8), np.float32)}

    response = messages.pull_sparse_response(Pulled(rows, 7))

    pulled = messages.pulled_rows(response, {"wide": 3, "deep": 2})
    assert {name: values.shape for name, values in pulled.rows.items()} == {
        "wide": (3, 1),
        "deep": (2, 8),
    }
    assert pulled.version == 7


def test_pulled_pieces_survive_the_wire() -> None:
    response = messages.pull_dense_response({"mlp": np.array([1.5, 2.5], np.float32)}, 3)

    pieces = messages.pulled_pieces(response)

    assert response.version == 3
    assert {name: piece.tolist() for name, piece in pieces.items()} == {"mlp": [1.5, 2.5]}


def test_gradients_survive_the_wire_in_their_order() -> None:
    wide = SparseGrad(np.array([3], np.uint64), np.ones((1, 2), np.float32), 5)
    empty = SparseGrad(np.zeros(0, np.uint64), np.zeros((0, 2), np.float32), 5)
    block = DenseGrad(np.array([1.0, 2.0], np.float32), 6)
    request = data_plane_pb2.PushGradRequest(
        sparse=[
            messages.sparse_grad_to_message("wide", wide),
            messages.sparse_grad_to_message("deep", empty),
        ],
        dense=[messages.dense_grad_to_message("mlp", block, start=9)],
    )

    sparse = messages.sparse_grads_of(request)
    dense = messages.dense_grads_of(request)

    assert [
        (name, grad.keys.tolist(), grad.values.tolist(), grad.examples) for name, grad in sparse
    ] == [
        ("wide", [3], [[1.0, 1.0]], 5),
        ("deep", [], [], 5),
    ]
    assert [(name, start, grad.values.tolist(), grad.examples) for name, start, grad in dense] == [
        ("mlp", 9, [1.0, 2.0], 6)
    ]


@given(stamp=STAMPS, at=st.none() | UINT64)
def test_part_of_a_push_survives_the_wire(stamp: Stamp, at: int | None) -> None:
    grad = SparseGrad(np.array([3], np.uint64), np.ones((1, 2), np.float32), 5)
    block = DenseGrad(np.array([1.0, 2.0], np.float32), 6)
    part = PushPart([("wide", grad)], [("mlp", 9, block)], part=1, num_parts=3)

    data = messages.push_grad_request(stamp, part, at).SerializeToString()
    found_stamp, found, found_at = messages.push_grad_arguments(
        data_plane_pb2.PushGradRequest.FromString(data)
    )

    assert (found_stamp, found_at, found.part, found.num_parts) == (stamp, at, 1, 3)
    assert [(name, rows.keys.tolist(), rows.examples) for name, rows in found.sparse] == [
        ("wide", [3], 5)
    ]
    assert [(name, start, piece.examples) for name, start, piece in found.dense] == [("mlp", 9, 6)]


@given(blocks=st.lists(NAMES), at=st.none() | UINT64)
def test_request_for_pieces_survives_the_wire(blocks: list[str], at: int | None) -> None:
    data = messages.pull_dense_request(blocks, at).SerializeToString()

    message = data_plane_pb2.PullDenseRequest.FromString(data)
    assert messages.pull_dense_arguments(message) == (blocks, at)


@given(numbers=st.lists(st.floats()), op=st.sampled_from(ReduceOp), worker=UINT32, step=UINT64)
def test_numbers_brought_to_a_barrier_survive_the_wire(
    numbers: list[float], op: ReduceOp, worker: int, step: int
) -> None:
    values = np.array(numbers, np.float64)

    data = messages.all_reduce_request("auc", worker, values, op, step).SerializeToString()

    request = control_plane_pb2.BarrierRequest.FromString(data)
    brought = messages.brought_numbers(request)
    assert (request.name, request.worker, request.step) == ("auc", worker, step)
    assert brought is not None
    assert (brought[0].tobytes(), brought[1]) == (values.tobytes(), op)


def test_barrier_may_be_met_without_numbers() -> None:
    assert messages.brought_numbers(control_plane_pb2.BarrierRequest(name="end")) is None


def test_op_that_is_none_is_refused() -> None:
    request = control_plane_pb2.BarrierRequest(name="end", op=9)  # type: ignore[arg-type]

    with pytest.raises(ProtocolError, match="'end' has op 9"):
        messages.brought_numbers(request)


@given(numbers=st.lists(st.floats()), version=UINT64)
def test_reduced_numbers_survive_the_wire(numbers: list[float], version: int) -> None:
    values = np.array(numbers, np.float64)

    data = messages.reduced_to_message(Reduced(values, version)).SerializeToString()

    found = messages.reduced_from_message(control_plane_pb2.BarrierResponse.FromString(data))
    assert (found.values.tobytes(), found.version) == (values.tobytes(), version)


@given(digests=st.dictionaries(st.tuples(NAMES, UINT32), st.binary(max_size=32)))
def test_digests_survive_the_wire(digests: dict[tuple[str, int], bytes]) -> None:
    data = messages.digests_to_message(digests).SerializeToString()

    message = control_plane_pb2.GetDigestResponse.FromString(data)
    assert messages.digests_from_message(message) == digests


def test_merged_status_adds_sizes_and_keeps_what_all_have_seen() -> None:
    first = StoreStatus(
        version=4,
        tables={
            "wide": TableStatus(rows=1, size_bytes=10),
            "deep": TableStatus(rows=5, size_bytes=6),
        },
        examples={0: 100, 1: 50},
        done=frozenset({0, 1}),
        staleness=Staleness().add(0, 6).add(3),
    )
    second = StoreStatus(
        version=3,
        tables={"wide": TableStatus(rows=2, size_bytes=20)},
        examples={0: 90},
        done=frozenset({1}),
        staleness=Staleness().add(0, 4).add(5, 3),
    )

    merged = messages.merge_status([first, second])

    assert merged == StoreStatus(
        version=3,
        tables={
            "wide": TableStatus(rows=3, size_bytes=30),
            "deep": TableStatus(rows=5, size_bytes=6),
        },
        examples={0: 100, 1: 50},
        done=frozenset({1}),
        staleness=Staleness().add(0, 10).add(3).add(5, 3),
    )
