"""One suite for every store: shrinks and the status."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.spec import OptimizerSpec
from ctr_ps.protos.store import Missing, Shrunk, Staleness, Store, WorkerProgress
from tests.support.stores import DEEP, KEYS, push_id, random_gradients


def test_worker_that_left_without_a_push_is_in_the_status(store):
    store.leave(0, step=0)

    assert store.status().examples == {0: 0}
    assert store.status().left == {0}


def test_status_counts_rows_examples_and_workers(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0, 0, examples=8)).result()
    first.push_grad(random_gradients(0), push_id(0, 1, examples=8)).result()
    second.push_grad(random_gradients(0), push_id(1, 0, examples=5)).result()
    second.leave(1, step=0)

    status = first.status()

    assert status.examples == {0: 16, 1: 5}
    assert status.left == {1}
    assert status.version == 3
    assert status.tables["deep"].rows == 60
    assert status.tables["deep"].size_bytes > 60 * 4 * 10


def test_status_counts_how_stale_batches_were(open_job, num_servers):
    """Every server counts every batch."""
    first, second = open_job(num_workers=2)
    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL).result().version

    first.push_grad(random_gradients(0), push_id(0, batches=4, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, batches=2, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, 1, batches=0, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, 2, pulled=99)).result()

    times = max(1, num_servers)
    assert first.status().staleness == Staleness().add(0, 5 * times).add(4, 2 * times)


def test_steps_in_common_are_never_stale(open_job, num_servers):
    """A worker's part counts once, however many batches it sums over."""
    stores = open_job(num_workers=2)
    for step in range(2):
        for worker, store in enumerate(stores):
            gradients = random_gradients(step)
            store.push_grad(
                gradients, push_id(worker, step, batches=3, pulled=step), at=step
            ).result()

    assert stores[0].status().staleness == Staleness().add(0, 4 * max(1, num_servers))


def test_status_tells_how_much_of_each_worker_is_applied(open_job):
    first, second = open_job(num_workers=2)
    push_ids = [replace(push_id(worker, 0), position=f"worker {worker}") for worker in range(2)]

    first.push_grad(random_gradients(0), push_ids[0], at=0).result()
    waiting = first.status().progress
    second.push_grad(random_gradients(1), push_ids[1], at=0).result()

    assert waiting == {}
    assert second.status().progress == {
        worker: WorkerProgress(incarnation=7, sequence=0, step=0, position=f"worker {worker}")
        for worker in range(2)
    }


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
