"""Keys of a pass against numpy's unique, on any number of threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import shard_of
from ctr_ps.ps_worker.extras.device_pass import pass_keys as module
from ctr_ps.ps_worker.extras.device_pass.pass_keys import NUM_PARTITIONS, PassKeys, pass_keys


@contextmanager
def pool(num_threads: int = 2) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(num_threads) as threads:
        yield threads


def columns(sizes: Sequence[int], num_values: int, *, seed: int = 0) -> list[Keys]:
    """Returns keys of which a few are frequent, as those of clicks; over all of uint64."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**64 - 1, num_values, dtype=np.uint64, endpoint=True)
    values[:2] = 0, 2**64 - 1
    return [values[(num_values * rng.random(size) ** 3).astype(int)] for size in sizes]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of splitting the work is taken, with few keys."""
    for name, size in (("PIECE_KEYS", 300), ("TASK_KEYS", 100), ("CHUNK_KEYS", 4000)):
        monkeypatch.setattr(module, name, size)


SIZES = [1000, 0, 3000, 1, 2999, 5000, 2500, 700, 0]


def assert_right(keys: PassKeys, rows: Sequence[Any], of: Sequence[Keys]) -> None:
    every = np.concatenate(of)
    np.testing.assert_array_equal(np.sort(keys.keys), np.unique(every))
    for column, found in zip(of, rows, strict=True):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(keys.keys[found], column)


@pytest.mark.parametrize("num_values", [2, 500, 100_000])
@pytest.mark.usefixtures("small_chunks")
def test_rows_are_those_of_the_keys(num_values: int) -> None:
    of = columns(SIZES, num_values)
    with pool() as threads:
        assert_right(*pass_keys(of, threads), of)


@pytest.mark.usefixtures("small_chunks")
def test_rows_do_not_depend_on_threads_nor_on_what_was_expected() -> None:
    of = columns(SIZES, 3000)
    with pool(1) as one, pool(5) as five:
        expected = pass_keys(of, one)
        like = pass_keys(columns([20_000], 30_000, seed=1), five)[0]
        for found in (pass_keys(of, five), pass_keys(of, five, like=like)):
            np.testing.assert_array_equal(found[0].keys, expected[0].keys)
            for ours, theirs in zip(found[1], expected[1], strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_large_columns_of_the_real_sizes() -> None:
    of = columns([200_000, 1_000_000], 400_000)
    with pool() as threads:
        assert_right(*pass_keys(of, threads), of)


def test_rows_of_a_partition_are_of_few_shards() -> None:
    with pool() as threads:
        keys = pass_keys(columns([50_000], 50_000), threads)[0].keys
    shards = np.array([int(shard_of(key, 2 * NUM_PARTITIONS)) for key in keys])

    assert (np.diff(shards // 2) >= 0).all()


@pytest.mark.parametrize("sizes", [[0], [0, 0]])
def test_pass_without_keys_is_empty(sizes: Sequence[int]) -> None:
    with pool() as threads:
        keys, rows = pass_keys([np.empty(size, np.uint64) for size in sizes], threads)
        other = pass_keys(columns([10], 10), threads)[0]

        assert keys.keys.size == 0
        assert [each.size for each in rows] == list(sizes)
        assert (keys.rows_of(other, threads) == -1).all()
        assert other.rows_of(keys, threads).size == 0


def test_rows_of_another_pass_are_found() -> None:
    with pool() as threads:
        first = pass_keys(columns([5000], 4000), threads)[0]
        second = pass_keys(
            [np.concatenate([columns([900], 4000)[0], np.arange(5, 700, dtype=np.uint64)])], threads
        )[0]

        rows = first.rows_of(second, threads)

    row_of = {int(key): row for row, key in enumerate(first.keys)}
    assert rows.tolist() == [row_of.get(int(key), -1) for key in second.keys]
    assert 0 < (rows < 0).sum() < rows.size


def test_more_keys_than_int32_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_ROWS", 64)
    with pool() as threads, pytest.raises(UsageError, match=r"over 4096 distinct keys.*pass_rows"):
        pass_keys([np.arange(100_000, dtype=np.uint64)], threads)
