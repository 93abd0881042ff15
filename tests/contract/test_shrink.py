"""One suite for every store: small rows that are removed."""

import math
from dataclasses import replace

import numpy as np
import pytest

from protos.errors import ProtocolError
from protos.gradients import Gradients, SparseGrad
from protos.spec import OptimizerSpec
from protos.store import Missing, Shrunk, Store
from tests.support.stores import DEEP, KEYS, in_process, pull, push_id, random_gradients


def norms(store: Store, table: str) -> np.ndarray:
    """Returns the norm of each key's row, float64[N]; 0 without one."""
    rows = store.pull_sparse({table: KEYS}, missing=Missing.ZEROS).result().rows[table]
    return np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))


def trained(store: Store) -> Store:
    """Gives 60 keys rows in both tables."""
    store.push_grad(random_gradients(0), push_id()).result()
    return store


def test_rows_up_to_a_norm_are_removed_from_all_tables(store: Store) -> None:
    trained(store)
    before = store.status()
    deep, wide = norms(store, "deep"), norms(store, "wide")
    limit = float(np.median(np.concatenate([deep[deep > 0], wide[wide > 0]])))

    shrunk = store.shrink(max_norm=limit)

    assert {name: table.rows for name, table in shrunk.items()} == {
        "deep": np.count_nonzero((deep > 0) & (deep <= limit)),
        "wide": np.count_nonzero((wide > 0) & (wide <= limit)),
    }
    assert all(0 < table.rows < 60 for table in shrunk.values())
    assert {table.rows + table.left_rows for table in shrunk.values()} == {60}
    np.testing.assert_array_equal(norms(store, "deep"), np.where(deep > limit, deep, 0))
    np.testing.assert_array_equal(norms(store, "wide"), np.where(wide > limit, wide, 0))
    after = store.status()
    for name, table in shrunk.items():
        assert after.tables[name].rows == before.tables[name].rows - table.rows
        assert after.tables[name].size_bytes == before.tables[name].size_bytes - table.size_bytes
        assert table.size_bytes >= 4 * table.rows
    again = store.shrink(max_norm=limit)
    assert again == {name: Shrunk(left_rows=table.left_rows) for name, table in shrunk.items()}


def test_removed_key_reads_and_learns_as_one_that_was_never_there(store: Store) -> None:
    fresh = in_process()
    trained(store).shrink(max_norm=1e9)
    grad = SparseGrad(KEYS[:5], np.ones((5, 5), np.float32), 1)

    np.testing.assert_array_equal(pull(store)["deep"], pull(fresh)["deep"])
    for each in (store, fresh):
        each.push_grad(Gradients({"deep": grad}), push_id(sequence=1)).result()

    np.testing.assert_array_equal(pull(store)["deep"], pull(fresh)["deep"])
    assert store.status().tables["deep"].rows == 5


def test_same_rows_are_removed_anywhere(store: Store) -> None:
    reference = trained(in_process())

    assert trained(store).shrink(max_norm=0.2)["deep"].rows > 0
    reference.shrink(max_norm=0.2)

    assert store.digest() == reference.digest()


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.inf, math.nan])
def test_norm_that_makes_no_sense_removes_nothing(store: Store, max_norm: float) -> None:
    trained(store)
    before = store.digest()

    with pytest.raises(ProtocolError, match=f"max_norm is {max_norm}, expected a finite number"):
        store.shrink(max_norm=max_norm)

    assert store.digest() == before


def test_table_with_replicas_is_not_shrunk(store: Store) -> None:
    adding = OptimizerSpec(name="sum")
    store.create_table(replace(DEEP, name="copied", optimizer=adding, records_changes=True))
    before = trained(store).status().tables

    with pytest.raises(ProtocolError, match="'copied' has replicas"):
        store.shrink(max_norm=1e9)

    assert store.status().tables == before
