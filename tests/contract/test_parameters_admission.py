"""One suite for every store: which keys get a row does not depend on who holds them."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import AdmissionSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing, Store
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import DEEP, KEYS, WIDE, OpenJob, declare, push_id

SCORED = replace(WIDE, name="scored", num_shards=64, statistics=StatisticsSpec())
HOT = AdmissionSpec(policy="score", threshold=3.0, table="scored")
ADMISSIONS = {
    "count": AdmissionSpec(threshold=3),
    "bloom": AdmissionSpec(threshold=3, counter="bloom", expected_keys=200),
    "probability": AdmissionSpec(policy="probability", threshold=0.3),
    "score": AdmissionSpec(policy="score", threshold=1.5),
    "other-table": HOT,
}


def admitting(admission: AdmissionSpec) -> TableSpec:
    return replace(DEEP, name="admitting", statistics=StatisticsSpec(), admission=admission)


def gradients_of(seed: int) -> Gradients:
    """Gradients of some keys for both tables; the one that is admitted by the other comes first."""
    random = np.random.default_rng(seed)
    keys = random.choice(KEYS, 60, replace=False)
    shows = random.integers(1, 4, keys.size)
    counts = np.stack([shows, shows // 2], axis=1).astype(np.uint32)

    def grad(dim: int) -> SparseGrad:
        values = random.normal(size=(keys.size, dim)).astype(np.float32)
        return SparseGrad(keys, values, 8, counts)

    return Gradients({"admitting": grad(5), "scored": grad(1)})


def train(stores: list[Store], steps: int) -> None:
    """Takes synchronous steps, the parts of the workers in turn."""
    for step in range(steps):
        for worker, store in enumerate(stores):
            push = push_id(worker, sequence=step, examples=8, pulled=step)
            store.push_grad(gradients_of(2 * step + worker), push, at=step).result()


def read(store: Store, keys: Keys = KEYS) -> np.ndarray:
    return (
        store.pull_sparse({"admitting": keys}, missing=Missing.INITIAL).result().rows["admitting"]
    )


@pytest.mark.parametrize("admission", ADMISSIONS.values(), ids=ADMISSIONS)
@pytest.mark.parametrize("chunk_bytes", [2000, 2**20])
def test_two_workers_admit_the_same_keys_on_every_number_of_servers(
    open_job: OpenJob, admission: AdmissionSpec, chunk_bytes: int
) -> None:
    stores = open_job(num_workers=2, chunk_bytes=chunk_bytes)
    expected = ParameterStore(num_workers=2)
    declare(expected)
    for store in {id(store): store for store in [*stores, expected]}.values():
        store.create_table(SCORED)
        store.create_table(admitting(admission))

    train(stores, steps=4)
    train([expected] * 2, steps=4)

    assert stores[0].digest() == expected.digest()
    found, wanted = (each.status().tables["admitting"] for each in (stores[0], expected))
    assert found.rows == wanted.rows
    assert found.candidates == wanted.candidates
    assert 10 < found.rows < np.unique(KEYS).size - 10
    np.testing.assert_array_equal(read(stores[0]), read(expected))


def test_counts_of_all_workers_add_up(open_job: OpenJob) -> None:
    stores = open_job(num_workers=2)
    for store in stores:
        store.create_table(admitting(AdmissionSpec(threshold=2)))
    keys = KEYS[:10]
    grad = SparseGrad(keys, np.ones((10, 5), np.float32), 1, np.tile(np.uint32([1, 0]), (10, 1)))

    for worker, store in enumerate(stores):
        store.push_grad(Gradients({"admitting": grad}), push_id(worker), at=0).result()

    assert stores[0].status().tables["admitting"].rows == 10


def test_score_includes_the_push_that_is_admitted_by_it(store: Store) -> None:
    store.create_table(SCORED)
    store.create_table(admitting(replace(HOT, threshold=1.0)))
    keys = KEYS[:10]
    clicks = np.arange(10) % 2
    counts = np.stack([np.ones(10), clicks], axis=1).astype(np.uint32)
    grads = {
        name: SparseGrad(keys, np.ones((10, dim), np.float32), 1, counts)
        for name, dim in (("admitting", 5), ("scored", 1))
    }

    store.push_grad(Gradients(grads), push_id()).result()

    tables = store.status().tables
    assert (tables["admitting"].rows, tables["scored"].rows) == (5, 10)
    np.testing.assert_array_equal(read(store, keys).any(axis=1), clicks)


def test_unadmitted_keys_read_the_default_value_in_training_too(store: Store) -> None:
    store.create_table(admitting(AdmissionSpec(threshold=2, default_value=0.5)))

    assert np.all(read(store) == 0.5)


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        (None, "'scored', which is not declared: declare that one first"),
        (replace(SCORED, statistics=None), "which keeps no statistics"),
        (replace(SCORED, num_shards=4), "which has 4 shards, not 64"),
        (
            replace(SCORED, admission=replace(HOT, table="first")),
            "which itself admits by the score of 'first': name that one",
        ),
    ],
)
def test_score_that_cannot_be_had_is_refused(
    store: Store, scoring: TableSpec | None, message: str
) -> None:
    store.create_table(replace(SCORED, name="first"))
    if scoring is not None:
        store.create_table(scoring)

    with pytest.raises(SpecError, match=message):
        store.create_table(admitting(HOT))

    assert "admitting" not in store.status().tables
