"""Counts of keys: exact while there are few, within known bounds when there are many."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctr_ps.ps_worker.extras.data_tools.profiling import value_counts
from ctr_ps.ps_worker.extras.data_tools.profiling.value_counts import ValueCounts


def counted(*blocks: NDArray[np.uint64]) -> ValueCounts:
    values = ValueCounts()
    for block in blocks:
        values.add(block)
    return values


def expected_top(keys: list[int], num_keys: int) -> list[tuple[int, int]]:
    return sorted(Counter(keys).items(), key=lambda item: (-item[1], item[0]))[:num_keys]


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=600), st.integers(0, 600))
def test_few_keys_are_counted_exactly_however_they_come(keys: list[int], cut: int) -> None:
    array = np.array(keys, np.uint64)

    values = counted(array[:cut], array[cut:])

    assert values.is_exact
    assert values.num_distinct == len(set(keys))
    assert values.top(7) == expected_top(keys, 7)


def test_table_grows_up_to_its_bound_without_an_error() -> None:
    keys = np.arange(value_counts.MAX_EXACT, dtype=np.uint64)

    values = counted(keys, keys[:3])

    assert values.is_exact
    assert values.num_distinct == value_counts.MAX_EXACT
    assert values.top(4) == [(0, 2), (1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize("num_keys", [70_000, 300_000])
def test_many_keys_are_estimated_within_four_standard_errors(num_keys: int) -> None:
    keys = np.random.default_rng(num_keys).integers(0, 2**64, num_keys, dtype=np.uint64)

    values = counted(keys, keys)

    assert not values.is_exact
    assert abs(values.num_distinct / num_keys - 1) < 4 * 0.0081


def test_estimate_has_the_standard_error_that_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the whole range, which is where uncorrected estimators fail: from few keys on."""
    monkeypatch.setattr(value_counts, "MAX_EXACT", 1 << 8)
    errors = []
    for seed in range(60):
        num_keys = int(np.geomspace(600, 200_000, 60)[seed])
        keys = np.random.default_rng(seed).integers(0, 2**64, num_keys, dtype=np.uint64)
        errors.append(counted(keys).num_distinct / num_keys - 1)

    assert 0.004 < np.std(errors) < 0.0115
    assert abs(np.mean(errors)) < 0.004


def test_frequent_keys_survive_many_rare_ones_within_the_undercount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(value_counts, "MAX_EXACT", 1 << 8)
    rng = np.random.default_rng(1)
    frequent = np.repeat(np.arange(5, dtype=np.uint64), [9000, 8000, 7000, 6000, 5000])
    keys = np.concatenate([frequent, rng.integers(10, 2**63, 20_000, dtype=np.uint64)])
    rng.shuffle(keys)

    values = counted(*np.array_split(keys, 7))

    assert 0 < values.undercount <= 2 * len(keys) / value_counts.MAX_EXACT
    for (key, count), (expected_key, expected) in zip(
        values.top(5), expected_top(keys.tolist(), 5), strict=True
    ):
        assert key == expected_key
        assert expected - values.undercount <= count <= expected


def test_every_purge_is_taken_off_a_key_that_is_there_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(value_counts, "MAX_EXACT", 1 << 8)
    early = np.zeros(3000, np.uint64)

    values = counted(early, np.arange(1, 20_000, dtype=np.uint64))

    assert values.top(1) == [(0, 3000 - values.undercount)]


def test_nothing_is_counted_as_nothing() -> None:
    values = counted(np.empty(0, np.uint64))

    assert (values.num_distinct, values.top(3), values.is_exact) == (0, [], True)
