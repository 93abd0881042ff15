"""One suite for every store: counts travel with gradients."""

from dataclasses import replace

import numpy as np
import pytest

from protos.errors import GradientError, SpecConflictError
from protos.gradients import Gradients, SparseGrad
from protos.spec import ExpirySpec, StatisticsSpec
from protos.store import Missing, Store
from tests.support.stores import DEEP, KEYS, OpenJob, random_gradients, stamp

COUNTED = replace(DEEP, name="counted", statistics=StatisticsSpec())


def counted_gradients(seed: int) -> SparseGrad:
    grad = random_gradients(seed).sparse["deep"]
    shows = np.random.default_rng(seed).integers(1, 9, grad.keys.size)
    return replace(grad, counts=np.stack([shows, shows // 3], axis=1).astype(np.uint32))


def rows_of(store: Store, table: str) -> np.ndarray:
    return store.pull_sparse({table: KEYS}, missing=Missing.ZEROS).result().rows[table]


@pytest.mark.parametrize("part_bytes", [100, 2**20])
def test_counts_leave_rows_as_they_are(open_job: OpenJob, part_bytes: int) -> None:
    (store,) = open_job(part_bytes=part_bytes)
    store.create_table(replace(COUNTED, name="deep2"))
    store.create_table(replace(DEEP, name="deep3"))

    for sequence in range(3):
        grad = counted_gradients(sequence)
        plain = replace(grad, counts=None)
        gradients = Gradients({"deep2": grad, "deep3": plain})
        store.push_grad(gradients, stamp(sequence=sequence)).result()

    touched = rows_of(store, "deep3").any(axis=1)
    np.testing.assert_array_equal(rows_of(store, "deep2").any(axis=1), touched)
    assert touched.sum() > 60


def test_push_without_counts_to_a_table_that_counts_changes_nothing(store: Store) -> None:
    store.create_table(COUNTED)
    good = counted_gradients(0)
    before = store.digest()

    for bad in (replace(good, counts=None), replace(good, counts=good.counts[:-1])):
        with pytest.raises(GradientError, match="'counted' has"):
            store.push_grad(Gradients({"counted": bad}), stamp()).result()

    assert store.digest() == before


def test_push_with_counts_to_a_table_that_does_not_count_changes_nothing(store: Store) -> None:
    gradients = random_gradients(0)
    deep = replace(gradients.sparse["deep"], counts=counted_gradients(0).counts)
    before = store.digest()

    with pytest.raises(GradientError, match="'deep' has counts, but the table keeps no"):
        store.push_grad(replace(gradients, sparse={"deep": deep}), stamp()).result()

    assert store.digest() == before


def test_push_without_keys_needs_no_counts(store: Store) -> None:
    store.create_table(COUNTED)
    empty = SparseGrad(np.empty(0, np.uint64), np.empty((0, 5), np.float32), 3)

    store.push_grad(Gradients({"counted": empty}), stamp()).result()

    assert store.status().tables["counted"].rows == 0


def test_parts_of_a_step_may_be_without_keys(open_job: OpenJob) -> None:
    """Such a part has no counts; those of the others stay."""
    stores = open_job(num_workers=2)
    for store in stores:
        store.create_table(COUNTED)
    grad = counted_gradients(0)
    empty = SparseGrad(np.empty(0, np.uint64), np.empty((0, 5), np.float32), 3)

    stores[0].push_grad(Gradients({"counted": empty}), stamp(0, examples=3), at=0).result()
    stores[1].push_grad(Gradients({"counted": grad}), stamp(1, examples=8), at=0).result()

    pulled = stores[0].pull_sparse({"counted": KEYS}, missing=Missing.ZEROS, at=1).result()
    assert np.count_nonzero(pulled.rows["counted"].any(axis=1)) == grad.keys.size


def test_expiry_without_statistics_is_refused(store: Store) -> None:
    with pytest.raises(SpecConflictError, match="'counted' has expiry but keeps no statistics"):
        store.create_table(replace(COUNTED, statistics=None, expiry=ExpirySpec(max_unseen=3)))
