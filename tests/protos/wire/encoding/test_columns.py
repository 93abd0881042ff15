"""Keys, rows, gradients and workers' messages to messages and back: nothing is lost on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad, SparseGrad
from ctr_ps.protos.store import Missing, Pulled, PulledPieces, PushId
from ctr_ps.protos.v1 import data_plane_pb2
from ctr_ps.protos.wire.calls import PULL_DENSE, PULL_SPARSE, PUSH_GRAD
from ctr_ps.protos.wire.requests import PullSparse, PushGrad
from tests.support.local_transport import through
from tests.support.stores import push_id

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
PUSH_IDS = st.builds(
    PushId,
    worker=UINT32,
    incarnation=UINT64,
    sequence=UINT64,
    step=UINT64,
    examples=UINT64,
    batches=UINT64,
    pulled=UINT64,
    position=st.text(),
    weight=st.none() | st.floats(0, 1e300),
)


@pytest.mark.parametrize("missing", Missing)
@pytest.mark.parametrize("at", [None, 0, 7])
def test_pull_request_says_what_is_missing_and_which_version(
    missing: Missing, at: int | None
) -> None:
    """Version 0 is a version, not the absence of one."""
    keys = {"wide": np.array([1, 2**64 - 1], np.uint64), "deep": np.zeros(0, np.uint64)}

    request = PullSparse(keys=keys, missing=missing, at=at, shard_map_epoch=7)

    found = through(PULL_SPARSE.request, request)
    assert {name: column.tolist() for name, column in found.keys.items()} == {
        "wide": [1, 2**64 - 1],
        "deep": [],
    }
    assert (found.missing, found.at, found.shard_map_epoch) == (missing, at, 7)


def test_pull_request_that_does_not_say_what_is_missing_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"missing is 0, expected one of INITIAL, ZEROS"):
        PULL_SPARSE.request.decode(b"")


def test_pull_request_with_two_columns_of_a_table_is_refused() -> None:
    columns = [data_plane_pb2.KeyColumn(table="wide", keys=bytes(8)) for _ in range(2)]

    with pytest.raises(
        ProtocolError, match=r"2 columns of keys, expected one for each of the tables \['wide'\]"
    ):
        PULL_SPARSE.request.decode(
            data_plane_pb2.PullSparseRequest(
                keys=columns, missing=data_plane_pb2.MISSING_ZEROS, shard_map_epoch=1
            ).SerializeToString()
        )


def chunk_of(*sparse: tuple[str, SparseGrad]) -> PushChunk:
    """Returns these gradients as they come off the wire."""
    push_id = PushId(
        worker=0, incarnation=0, sequence=0, step=1, examples=5, batches=1, pulled=0, position=""
    )
    request = PushGrad(chunk=PushChunk(sparse, []), push_id=push_id, shard_map_epoch=1)
    return through(PUSH_GRAD.request, request).chunk


@pytest.mark.parametrize("examples", [0.25, 7, 2.0**63, 1e30])
def test_weights_of_examples_survive_the_wire(examples: float) -> None:
    """A whole number of examples takes the field that it had before there were weights."""
    grad = SparseGrad(np.array([3], np.uint64), np.ones((1, 2), np.float32), examples)

    ((_, found),) = chunk_of(("wide", grad)).sparse

    assert found.examples == examples


@pytest.mark.parametrize("counts", [None, [[3, 0], [2**32 - 1, 2**32 - 2]]])
def test_counts_survive_the_wire(counts: list[list[int]] | None) -> None:
    numbers = None if counts is None else np.array(counts, np.uint32)
    grad = SparseGrad(np.array([3, 4], np.uint64), np.ones((2, 1), np.float32), 5, numbers)

    ((_, found),) = chunk_of(("wide", grad)).sparse

    assert (found.counts is None) == (counts is None)
    assert found.counts is None or found.counts.tolist() == counts


@pytest.mark.parametrize("missing", ["push_id", "chunk"])
def test_push_without_a_part_is_refused(missing: str) -> None:
    """A push without an id is not one of worker 0."""
    parts = {"push_id": data_plane_pb2.PushId(), "chunk": data_plane_pb2.PushChunk()}
    del parts[missing]

    with pytest.raises(ProtocolError, match=f"PushGradRequest has no {missing}"):
        PUSH_GRAD.request.decode(data_plane_pb2.PushGradRequest(**parts).SerializeToString())


@pytest.mark.parametrize("size", [1, 8, 15, 24])
def test_counts_that_are_not_two_a_key_are_refused(size: int) -> None:
    column = data_plane_pb2.SparseGradColumn(keys=bytes(16), values=bytes(8), counts=bytes(size))
    request = data_plane_pb2.PushGradRequest(
        push_id=data_plane_pb2.PushId(), chunk=data_plane_pb2.PushChunk(sparse=[column])
    )

    with pytest.raises(ProtocolError, match=f"counts has {size} bytes, expected 8 for each of 2"):
        PUSH_GRAD.request.decode(request.SerializeToString())


@given(push_id=PUSH_IDS, at=st.none() | UINT64)
def test_chunk_of_a_push_survives_the_wire(push_id: PushId, at: int | None) -> None:
    grad = SparseGrad(np.array([3], np.uint64), np.ones((1, 2), np.float32), 5)
    block = DenseGrad(np.array([1.0, 2.0], np.float32), 6)
    chunk = PushChunk([("wide", grad)], [("mlp", 9, block)], chunk=1, num_chunks=3)

    request = through(
        PUSH_GRAD.request, PushGrad(chunk=chunk, push_id=push_id, at=at, shard_map_epoch=7)
    )

    found = request.chunk
    assert (request.push_id, request.at, request.shard_map_epoch) == (push_id, at, 7)
    assert (found.chunk, found.num_chunks) == (1, 3)
    assert [(name, rows.keys.tolist(), rows.examples) for name, rows in found.sparse] == [
        ("wide", [3], 5)
    ]
    assert [
        (name, start, piece.values.tolist(), piece.examples) for name, start, piece in found.dense
    ] == [("mlp", 9, [1.0, 2.0], 6)]


@pytest.mark.parametrize("bfloat16", [False, True])
def test_columns_say_what_their_numbers_are(bfloat16: bool) -> None:
    """A bfloat16 has half of the bytes."""
    values = np.array([[1.5, -2.0], [0.0, 3.0]], np.float32)  # the same in both
    keys = np.array([1, 2], np.uint64)
    chunk = PushChunk(
        [("deep", SparseGrad(keys, values, 3))],
        [("tower", 4, DenseGrad(values.ravel(), 3))],
        bfloat16=bfloat16,
    )
    push = PushGrad(chunk=chunk, push_id=push_id(), shard_map_epoch=1)

    pushed = through(PUSH_GRAD.request, push).chunk
    rows = through(PULL_SPARSE.answer, Pulled({"deep": values}, 7, bfloat16))
    pieces = through(PULL_DENSE.answer, PulledPieces({"tower": values.ravel()}, 7, bfloat16))

    assert (pushed.bfloat16, rows.bfloat16, pieces.bfloat16) == (bfloat16,) * 3
    np.testing.assert_array_equal(pushed.sparse[0][1].values, values)
    np.testing.assert_array_equal(pushed.dense[0][2].values, values.ravel())
    np.testing.assert_array_equal(rows.rows["deep"], values)
    np.testing.assert_array_equal(pieces.pieces["tower"], values.ravel())
    assert (rows.version, pieces.version) == (7, 7)
    found = data_plane_pb2.PullSparseResponse.FromString(
        PULL_SPARSE.answer.encode(Pulled({"deep": values}, 7, bfloat16))
    )
    assert len(found.rows[0].values) == (2 if bfloat16 else 4) * values.size


def test_bfloat16s_that_are_cut_short_are_refused() -> None:
    column = data_plane_pb2.ValueColumn(table="deep", values=bytes(3), num_rows=1)
    answer = data_plane_pb2.PullSparseResponse(rows=[column], bfloat16=True)

    with pytest.raises(ProtocolError, match="a column of bfloat16 has 3 bytes, not a multiple of"):
        PULL_SPARSE.answer.decode(answer.SerializeToString())
