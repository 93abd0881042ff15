"""A table trained apart from the servers: what leaves it and what it takes over."""

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.replica_table import ReplicaTable
from ctr_ps.ps_server.table.sparse_table import SparseTable

DIM = 3
RATE = 0.5
SPEC = TableSpec(
    name="t",
    dim=DIM,
    initializer=InitializerSpec(scale=0.1),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": RATE}),
    num_shards=4,
)
MANY = np.arange(5_000, dtype=np.uint64)


def ones(keys: np.ndarray, value: float = 1.0) -> SparseGrad:
    return SparseGrad(keys, np.full((keys.size, DIM), value, np.float32), 1)


def initial(keys: np.ndarray) -> np.ndarray:
    return SparseTable(SPEC).pull(keys, Missing.INITIAL)


def in_key_order(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    return values[np.argsort(keys)]


def test_deltas_are_a_share_of_the_way_and_the_rows_go_that_far() -> None:
    table = ReplicaTable(SPEC)
    table.push(ones(MANY, 8.0))

    keys, deltas = table.take_deltas(0.25)

    np.testing.assert_allclose(deltas, np.full_like(deltas, -RATE * 2), rtol=1e-4)
    np.testing.assert_array_equal(
        table.pull(MANY, Missing.INITIAL), initial(MANY) + in_key_order(keys, deltas)
    )
    assert table.take_deltas(0.25)[0].size == 0


def test_rows_taken_over_are_created_or_moved_by_what_is_new() -> None:
    table = ReplicaTable(SPEC)
    half = MANY[::2]
    table.push(ones(half))  # trained, not yet taken

    table.merge(MANY, np.full((MANY.size, DIM), 7.0, np.float32))

    rows = table.pull(MANY, Missing.ZEROS)
    np.testing.assert_allclose(rows[1::2], 7.0)
    np.testing.assert_allclose(rows[::2], 7.0 - RATE, rtol=1e-5)
    keys, deltas = table.take_deltas(1.0)
    np.testing.assert_array_equal(np.sort(keys), half)
    np.testing.assert_allclose(deltas, np.full((half.size, DIM), -RATE), rtol=1e-4)


def test_row_taken_over_starts_with_fresh_optimizer_state() -> None:
    adagrad = OptimizerSpec(
        name="adagrad", params={"learning_rate": RATE, "initial_accumulator": 9.0}
    )
    table = ReplicaTable(
        TableSpec(name="t", dim=DIM, initializer=InitializerSpec(), optimizer=adagrad)
    )
    keys = np.array([3], np.uint64)
    table.merge(keys, np.full((1, DIM), 1.0, np.float32))

    table.push(ones(keys, 4.0))

    np.testing.assert_allclose(
        table.pull(keys, Missing.ZEROS), [[1.0 - RATE * 4 / 5] * DIM], rtol=1e-5
    )


@pytest.mark.parametrize("size", [0, 1])
def test_nothing_or_little_to_move_is_no_error(size: int) -> None:
    table = ReplicaTable(SPEC)

    table.merge(MANY[:size], np.ones((size, DIM), np.float32))

    assert table.status.rows == size
    assert table.take_deltas(1.0)[1].shape == (0, DIM)


@pytest.mark.parametrize("width", [1, DIM - 1, DIM + 1, 1000])
def test_rows_of_another_width_are_not_merged(width: int) -> None:
    """The kernel copies them as they are, over the rows behind."""
    table = ReplicaTable(SPEC)

    with pytest.raises(ProtocolError, match="expected dim 3"):
        table.merge(MANY, np.ones((MANY.size, width), np.float32))

    assert table.status.rows == 0
