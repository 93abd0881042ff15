"""A store whose tables are over the memory limit: which pushes it takes, and which it refuses."""

import numpy as np
import pytest

from ctr_ps.protos.errors import OverloadedError, UsageError
from ctr_ps.protos.gradients import Counts, Gradients, SparseGrad
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.spec import (
    AdmissionSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import push_id

LIMIT = 200_000
DIM = 8


def store_with(**settings: object) -> ParameterStore:
    store = ParameterStore(memory_limit=LIMIT)
    store.create_table(
        TableSpec(
            name="t",
            dim=DIM,
            initializer=InitializerSpec(scale=0.1),
            optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.1}),
            num_shards=4,
            **settings,
        )
    )
    return store


def push(store: ParameterStore, start: int, stop: int, at: int | None = None) -> None:
    keys = np.arange(start, stop, dtype=np.uint64)
    counts: Counts | None = None
    if store.engine.parameters.table("t").spec.statistics is not None:
        counts = np.ones((keys.size, 2), np.uint32)
    grad = SparseGrad(keys, np.ones((keys.size, DIM), np.float32), 1, counts)
    store.push_grad(Gradients({"t": grad}), push_id(), at=at).result()


def fill(store: ParameterStore) -> int:
    """Pushes new keys until they are refused; returns how many were taken."""
    for start in range(0, 100_000, 100):
        try:
            push(store, start, start + 100)
        except OverloadedError:
            return start
    raise AssertionError("no push was refused")


def test_tables_over_the_limit_get_no_rows_and_the_push_leaves_no_trace() -> None:
    store = store_with()
    num_rows = fill(store)
    before = store.digest(), store.status()
    size = store.status().tables["t"].size_bytes

    with pytest.raises(
        OverloadedError,
        match=rf"key {num_rows} of table 't': tables have {size} bytes \('t' {size}\), more than the memory "
        rf"limit of {LIMIT}. Remove rows",
    ) as refused:
        push(store, num_rows - 50, num_rows + 1)

    assert refused.value.retry_after_s is None
    assert (store.digest(), store.status()) == before
    assert LIMIT < size < 1.2 * LIMIT


def test_rows_that_exist_are_trained_on_over_the_limit() -> None:
    store = store_with()
    num_rows = fill(store)
    before = store.digest()

    push(store, 0, num_rows)

    assert store.digest() != before
    assert store.status().tables["t"].rows == num_rows


def test_part_of_a_synchronous_step_is_refused_too() -> None:
    store = store_with()
    num_rows = fill(store)

    with pytest.raises(OverloadedError, match="refuses a new row"):
        push(store, num_rows, num_rows + 1, at=store.status().version)


def test_rows_are_created_again_once_others_are_removed() -> None:
    store = store_with(
        statistics=StatisticsSpec(decay=0.5), expiry=ExpirySpec(delete_threshold=0.8)
    )
    num_rows = fill(store)
    store.shrink()

    push(store, num_rows, num_rows + 100)

    assert store.status().tables["t"].rows == 100


def test_table_at_its_own_limit_evicts_over_the_limit() -> None:
    """Every shard has its 50 rows, so a new row is one in the place of others."""
    store = store_with(statistics=StatisticsSpec(), expiry=ExpirySpec(max_rows=200))
    other = TableSpec(
        name="other",
        dim=1000,
        initializer=InitializerSpec(),
        optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.1}),
    )
    store.create_table(other)
    shards = [shard_of(np.uint64(key), 4) for key in range(1_000)]
    for shard in range(4):
        for key in [key for key in range(1_000) if shards[key] == shard][:50]:
            push(store, key, key + 1)
    keys = np.arange(100, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((100, 1000), np.float32), 1)
    store.push_grad(Gradients({"other": grad}), push_id(sequence=1)).result()
    assert (store.status().tables["t"].rows, store.status().tables["t"].evicted) == (200, 0)

    push(store, 1_000, 1_001)

    assert store.status().tables["t"].evicted > 0


def test_candidates_count() -> None:
    store = store_with(statistics=StatisticsSpec(), admission=AdmissionSpec(threshold=2))

    num_keys = fill(store)

    status = store.status().tables["t"]
    assert (status.rows, status.candidates) == (0, num_keys)
    assert status.size_bytes + status.candidate_bytes > LIMIT


def test_store_without_a_limit_takes_everything() -> None:
    store = ParameterStore()
    store.create_table(store_with().engine.parameters.table("t").spec)

    push(store, 0, 100_000)

    assert store.status().tables["t"].rows == 100_000


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_of_no_bytes_is_refused(limit: int) -> None:
    with pytest.raises(UsageError, match=f"memory_limit is {limit}, expected at least 1 byte"):
        ParameterStore(memory_limit=limit)
