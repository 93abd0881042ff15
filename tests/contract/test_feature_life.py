"""One suite for every store: counts travel with gradients, and rows come and go by them.

Which keys get a row, and which lose it, does not depend on who holds them.
"""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import GradientError, SpecError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import AdmissionSpec, ExpirySpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Missing, Store
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import (
    DEEP,
    KEYS,
    WIDE,
    OpenJob,
    declare,
    in_process,
    push_id,
    random_gradients,
)

COUNTED = replace(DEEP, name="counted", statistics=StatisticsSpec())


def counted_gradients(seed: int) -> SparseGrad:
    grad = random_gradients(seed).sparse["deep"]
    shows = np.random.default_rng(seed).integers(1, 9, grad.keys.size)
    return replace(grad, counts=np.stack([shows, shows // 3], axis=1).astype(np.uint32))


def rows_of(store: Store, table: str) -> np.ndarray:
    return store.pull_sparse({table: KEYS}, missing=Missing.ZEROS).result().rows[table]


@pytest.mark.parametrize("chunk_bytes", [100, 2**20])
def test_counts_leave_rows_as_they_are(open_job: OpenJob, chunk_bytes: int) -> None:
    (store,) = open_job(chunk_bytes=chunk_bytes)
    store.create_table(replace(COUNTED, name="deep2"))
    store.create_table(replace(DEEP, name="deep3"))

    for sequence in range(3):
        grad = counted_gradients(sequence)
        plain = replace(grad, counts=None)
        gradients = Gradients({"deep2": grad, "deep3": plain})
        store.push_grad(gradients, push_id(sequence=sequence)).result()

    touched = rows_of(store, "deep3").any(axis=1)
    np.testing.assert_array_equal(rows_of(store, "deep2").any(axis=1), touched)
    assert touched.sum() > 60


def test_push_without_counts_to_a_table_that_counts_changes_nothing(store: Store) -> None:
    store.create_table(COUNTED)
    good = counted_gradients(0)
    before = store.digest()

    for bad in (replace(good, counts=None), replace(good, counts=good.counts[:-1])):
        with pytest.raises(GradientError, match="'counted' has"):
            store.push_grad(Gradients({"counted": bad}), push_id()).result()

    assert store.digest() == before


def test_push_with_counts_to_a_table_that_does_not_count_changes_nothing(store: Store) -> None:
    gradients = random_gradients(0)
    deep = replace(gradients.sparse["deep"], counts=counted_gradients(0).counts)
    before = store.digest()

    with pytest.raises(GradientError, match="'deep' has counts, but the table keeps no"):
        store.push_grad(replace(gradients, sparse={"deep": deep}), push_id()).result()

    assert store.digest() == before


def test_parts_of_a_step_may_be_without_keys(open_job: OpenJob) -> None:
    """Such a part has no counts; those of the others stay."""
    stores = open_job(num_workers=2)
    for store in stores:
        store.create_table(COUNTED)
    grad = counted_gradients(0)
    empty = SparseGrad(np.empty(0, np.uint64), np.empty((0, 5), np.float32), 3)

    stores[0].push_grad(Gradients({"counted": empty}), push_id(0, examples=3), at=0).result()
    stores[1].push_grad(Gradients({"counted": grad}), push_id(1, examples=8), at=0).result()

    pulled = stores[0].pull_sparse({"counted": KEYS}, missing=Missing.ZEROS, at=1).result()
    assert np.count_nonzero(pulled.rows["counted"].any(axis=1)) == grad.keys.size


SHORT = ExpirySpec(delete_threshold=1.5, max_unseen=1)


def shown(store: Store, keys: np.ndarray, shows: object, sequence: int = 0) -> None:
    counts = np.zeros((keys.size, 2), np.uint32)
    counts[:, 0] = shows
    grad = SparseGrad(keys, np.ones((keys.size, 5), np.float32), 1, counts)
    store.push_grad(Gradients({"counted": grad}), push_id(sequence=sequence)).result()


def test_rows_expire_by_the_rules_of_their_table(store: Store) -> None:
    """A show is worth 0.1, and after a pass 0.098."""
    store.create_table(replace(COUNTED, expiry=SHORT))
    store.push_grad(random_gradients(0), push_id()).result()
    shows = np.arange(KEYS.size) % 32
    shown(store, KEYS, shows, sequence=1)

    shrunk = store.shrink()

    assert {name: table.rows for name, table in shrunk.items()} == {
        "counted": np.count_nonzero(shows <= 15),
        "deep": 0,
        "wide": 0,
    }
    np.testing.assert_array_equal(rows_of(store, "counted").any(axis=1), shows > 15)
    status = store.status().tables
    assert status["counted"].rows == np.count_nonzero(shows > 15)
    assert status["counted"].expired == shrunk["counted"].rows
    assert status["deep"].rows == 60
    assert store.shrink()["counted"].rows == status["counted"].rows  # unseen for two passes


def test_dry_run_says_the_same_and_changes_nothing(store: Store) -> None:
    store.create_table(replace(COUNTED, expiry=SHORT))
    shown(store, KEYS, np.arange(KEYS.size) % 32)
    before, digest = store.status().tables, store.digest()

    said = [store.shrink(dry_run=True) for _ in range(3)]

    assert store.status().tables == before
    assert store.digest() == digest
    shrunk = store.shrink()
    assert said == [shrunk] * 3
    after = store.status().tables["counted"].size_bytes
    assert before["counted"].size_bytes - after == shrunk["counted"].size_bytes > 0


def test_norm_is_a_rule_beside_those_of_tables(store: Store) -> None:
    store.create_table(replace(COUNTED, expiry=SHORT))
    store.push_grad(random_gradients(0), push_id()).result()
    shown(store, KEYS, 100, sequence=1)

    assert store.shrink(max_norm=1e9, dry_run=True)["deep"].rows == 60
    shrunk = store.shrink(max_norm=1e9)

    assert {name: table.rows for name, table in shrunk.items()} == {
        "counted": KEYS.size,
        "deep": 60,
        "wide": 60,
    }


def test_same_rows_expire_and_are_evicted_anywhere(open_job: OpenJob) -> None:
    spec = replace(
        COUNTED, expiry=ExpirySpec(delete_threshold=0.3, max_rows=400, evict="score"), num_shards=8
    )
    (store,) = open_job()
    reference = in_process()
    keys = np.random.default_rng(4).integers(0, 2**64, 1000, dtype=np.uint64)
    for each in (store, reference):
        each.create_table(spec)
        for sequence in range(4):
            chosen = np.random.default_rng(sequence).choice(keys, 300, replace=False)
            shown(each, chosen, chosen % np.uint64(9), sequence)
            each.shrink()

    status = store.status().tables["counted"]
    assert 0 < status.rows <= 400
    assert status.evicted > 0
    assert status.expired > 0
    assert status.rows == reference.status().tables["counted"].rows
    assert store.digest() == reference.digest()


def test_full_table_of_a_cluster_keeps_to_its_limit(store: Store) -> None:
    store.create_table(replace(COUNTED, expiry=ExpirySpec(max_rows=640)))
    for sequence in range(10):
        keys = np.random.default_rng(sequence).integers(0, 2**64, 500, dtype=np.uint64)
        shown(store, keys, 1, sequence)

    status = store.status().tables["counted"]

    assert 320 < status.rows <= 640
    assert status.rows + status.evicted == 5000


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
    rows = store.pull_sparse({"admitting": keys}, missing=Missing.INITIAL).result().rows
    return rows["admitting"]


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
        (None, "'scored', which is not declared: declare that table first"),
        (replace(SCORED, statistics=None), "which keeps no statistics"),
        (replace(SCORED, num_shards=4), "which has 4 shards, not 64"),
        (
            replace(SCORED, admission=replace(HOT, table="first")),
            "which itself uses the score of 'first': name 'first' instead",
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
