"""Threads that share a table lose nothing, and none waits for ever."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.threads import run_together

DIM = 64
NUM_KEYS = 4000
PUSHES = 40
OCCURRENCES = 20_000

ALL_KEYS: Keys = np.random.default_rng(0).integers(0, 2**64, NUM_KEYS, np.uint64)


def new_table(region_bytes: int, num_subscribers: int = 0) -> SparseTable:
    """Returns a table that counts: each push of ones takes 1 from the weights, exactly."""
    spec = TableSpec(
        name="t",
        dim=DIM,
        initializer=InitializerSpec(),
        optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
        num_shards=8,
    )
    return SparseTable(spec, region_bytes=region_bytes, num_subscribers=num_subscribers)


def push_random_keys(table: SparseTable, seed: int, counts: np.ndarray) -> None:
    """Pushes all keys many times over, so that a push lasts long enough to be disturbed."""
    rng = np.random.default_rng(seed)
    for push in range(PUSHES):
        chosen = rng.integers(0, NUM_KEYS * (push + 1) // PUSHES, OCCURRENCES)
        ones = np.ones((OCCURRENCES, DIM), np.float32)
        table.push(SparseGrad(ALL_KEYS[chosen], ones, 1))
        counts += np.bincount(chosen, minlength=NUM_KEYS)


def while_pushing(table: SparseTable, look: Callable[[], object], num_threads: int) -> np.ndarray:
    """Repeats `look` while threads push; returns how often each key was pushed."""
    counts = np.zeros((num_threads, NUM_KEYS), np.int64)
    is_over = threading.Event()

    def push_all() -> None:
        try:
            run_together(
                [partial(push_random_keys, table, i, counts[i]) for i in range(num_threads)]
            )
        finally:
            is_over.set()

    def look_on() -> None:
        while not is_over.is_set():
            look()

    run_together([push_all, look_on])
    return counts.sum(axis=0)


@pytest.mark.parametrize("region_bytes", [1000, 2**30], ids=["copied", "reserved"])
def test_two_pushing_and_a_pulling_thread_lose_nothing(region_bytes: int) -> None:
    """While regions grow and are copied, and the index of each shard doubles."""
    table = new_table(region_bytes)
    seen = np.zeros((NUM_KEYS, DIM), np.float32)

    def pull() -> None:
        weights = table.pull(ALL_KEYS, Missing.ZEROS)
        assert (weights == weights[:, :1]).all(), "a row was read while it was written"
        assert (weights <= seen).all(), "a push was undone"
        seen[:] = weights

    counts = while_pushing(table, pull, num_threads=2)

    assert table.pull(ALL_KEYS, Missing.ZEROS)[:, 0].tolist() == (-counts).tolist()
    assert table.status.rows == np.count_nonzero(counts)


def test_exports_see_whole_rows_while_others_push() -> None:
    table = new_table(1000)

    def export() -> None:
        for shard in table.shards:
            rows = table.export_shard(shard)
            assert np.isin(rows.keys, ALL_KEYS).all()
            assert (rows.weights == rows.weights[:, :1]).all(), (
                "a row was read while it was written"
            )
            assert (rows.weights < 0).all(), "a row was read before its first gradient"

    counts = while_pushing(table, export, num_threads=1)

    assert table.pull(ALL_KEYS, Missing.ZEROS)[:, 0].tolist() == (-counts).tolist()


@pytest.mark.parametrize("region_bytes", [1000, 2**30], ids=["copied", "reserved"])
def test_subscriber_that_takes_while_others_push_misses_no_change(region_bytes: int) -> None:
    """What it took last of each row is the row as it is in the end."""
    table = new_table(region_bytes, num_subscribers=2)
    seen: dict[int, float] = {}

    def take() -> int:
        keys, weights = table.take_changed(1, 500)
        assert np.unique(keys).size == keys.size
        assert (weights == weights[:, :1]).all(), "a row was read while it was written"
        assert all(weight <= seen.get(key, 0.0) for key, weight in by_key(keys, weights)), (
            "a row was taken in an older state"
        )
        seen.update(by_key(keys, weights))
        return keys.size

    def by_key(keys: Keys, weights: np.ndarray) -> list[tuple[int, float]]:
        return list(zip(keys.tolist(), weights[:, 0].tolist(), strict=True))

    counts = while_pushing(table, take, num_threads=2)
    while take() == 500:
        pass

    assert seen == {int(ALL_KEYS[i]): -float(counts[i]) for i in np.flatnonzero(counts)}


@pytest.mark.parametrize("region_bytes", [1000, 2**30], ids=["copied", "reserved"])
def test_move_that_takes_while_others_push_misses_no_change(region_bytes: int) -> None:
    """What it took last of each row is the row as it is in the end."""
    table = new_table(region_bytes)
    table.begin_move(table.shards)
    shards = frozenset(table.shards)
    seen: dict[int, float] = {}

    def take() -> int:
        ((rows, removed),) = table.take_moved(shards, 500)
        assert not removed.size
        assert (rows.weights == rows.weights[:, :1]).all(), "a row was read while it was written"
        seen.update(zip(rows.keys.tolist(), rows.weights[:, 0].tolist(), strict=True))
        return rows.keys.size

    counts = while_pushing(table, take, num_threads=2)
    while take() == 500:
        pass

    assert seen == {int(ALL_KEYS[i]): -float(counts[i]) for i in np.flatnonzero(counts)}


@pytest.mark.parametrize("region_bytes", [1000, 2**30], ids=["copied", "reserved"])
def test_evicting_while_others_push_removes_small_rows_alone(region_bytes: int) -> None:
    """Rows of zeros come and go between those that are pushed."""
    table = new_table(region_bytes, num_subscribers=1)
    zeros = SparseGrad(~ALL_KEYS, np.zeros((NUM_KEYS, DIM), np.float32), 1)

    def push_and_evict() -> None:
        table.push(zeros)
        assert table.shrink(max_norm=0.0).rows == NUM_KEYS
        assert not table.pull(~ALL_KEYS, Missing.ZEROS).any()

    counts = while_pushing(table, push_and_evict, num_threads=2)

    assert table.pull(ALL_KEYS, Missing.ZEROS)[:, 0].tolist() == (-counts).tolist()
    assert table.status.rows == np.count_nonzero(counts)
    assert table.take_changed(0, NUM_KEYS)[0].size == np.count_nonzero(counts)
