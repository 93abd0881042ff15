"""Rows taken out of a table: which ones, and that nothing is left of them."""

import numpy as np
import pytest

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import InitializerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.checkpoint.files.digest import shard_digest
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.optimizers import plain_optimizer

SMALL = np.arange(0, 6000, 2, dtype=np.uint64)
LARGE = np.arange(1, 6000, 2, dtype=np.uint64)


def spec_of(optimizer: str = "adagrad", dim: int = 2) -> TableSpec:
    return TableSpec(
        name="t",
        dim=dim,
        initializer=InitializerSpec(kind="uniform", scale=0.5),
        optimizer=plain_optimizer(optimizer),
        num_shards=4,
    )


def write(table: SparseTable, keys: Keys, weights: np.ndarray) -> None:
    state = np.full((keys.size, table.state_width), 2, np.float32)
    table.write(Rows(keys, weights.astype(np.float32), state, state[:, :0]))


def fill(table: SparseTable, keys: Keys) -> None:
    """Writes rows with norms of 1 for even keys, and of 10 for odd ones."""
    norms = np.where(keys % 2 == 0, 1, 10)
    write(table, keys, norms[:, None] * [0.6, 0.8])


def size_of(table: SparseTable) -> tuple[int, int]:
    return table.status.rows, table.status.size_bytes


def everything(table: SparseTable) -> list[bytes]:
    return [shard_digest(table.export_shard(shard)) for shard in table.shards]


@pytest.mark.parametrize("seed", range(3))
def test_table_is_as_if_it_had_never_had_the_rows(seed: int) -> None:
    table, other = SparseTable(spec_of()), SparseTable(spec_of())
    order = np.random.default_rng(seed).permutation(6000).astype(np.uint64)
    fill(table, order)
    fill(other, LARGE)

    assert table.shrink(max_norm=2.0).rows == SMALL.size

    assert size_of(table) == size_of(other)
    assert everything(table) == everything(other)
    for copy in (table, other):  # rows that were there, rows that were taken out, and new ones
        keys = np.arange(5000, 9000, dtype=np.uint64)
        copy.push(SparseGrad(keys, np.ones((keys.size, 2), np.float32), 1))
    assert size_of(table) == size_of(other)
    assert everything(table) == everything(other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_removed_key_starts_afresh(name: str) -> None:
    """With its initial weights and state."""
    table, fresh = SparseTable(spec_of(name)), SparseTable(spec_of(name))
    gradient = SparseGrad(SMALL[:9], np.ones((9, 2), np.float32), 1)
    for _ in range(5):
        table.push(gradient)

    assert table.shrink(max_norm=1e9).rows == 9

    initial = table.pull(SMALL[:9], Missing.INITIAL)
    assert initial.tolist() == fresh.pull(SMALL[:9], Missing.INITIAL).tolist()
    assert not table.pull(SMALL[:9], Missing.ZEROS).any()
    table.push(gradient)
    fresh.push(gradient)
    assert everything(table) == everything(fresh)


@pytest.mark.parametrize(("max_norm", "left"), [(0.0, 3), (4.9, 3), (5.0, 2), (12.9, 2), (13.0, 1)])
def test_rows_up_to_the_norm_are_removed(max_norm: float, left: int) -> None:
    """The norm of the weights alone: states are larger."""
    table = SparseTable(spec_of(dim=3))
    write(table, SMALL[:3], np.array([[3, 0, -4], [3, 12, 4], [100, 0, 0]]))

    assert table.shrink(max_norm=max_norm).rows == 3 - left

    assert table.status.rows == left


def test_norm_0_removes_rows_of_zeros() -> None:
    table = SparseTable(spec_of(dim=3))
    write(table, SMALL[:4], np.array([[0, 0, 0], [1e-45, 0, 0], [0, -0.0, 0], [1e-30, 0, 0]]))

    assert table.shrink(max_norm=0.0).rows == 2
    assert table.shrink(max_norm=0.0).rows == 0


def test_norm_of_the_largest_weights_is_no_smaller_than_any_limit() -> None:
    """Their squares are infinite in float32."""
    table = SparseTable(spec_of(dim=3))
    write(table, SMALL[:1], np.array([[3e38, 3e38, 3e38]]))

    assert table.shrink(max_norm=5e38).rows == 0
    assert table.shrink(max_norm=6e38).rows == 1
