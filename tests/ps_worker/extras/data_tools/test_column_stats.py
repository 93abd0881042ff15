"""Statistics of numbers against plain numpy over all rows at once, counts of keys against plain counting."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from ctr_ps.ps_worker.extras.data_tools import column_stats
from ctr_ps.ps_worker.extras.data_tools.column_stats import NumberStats, ValueCounts

Floats = NDArray[np.float64]

tables = arrays(
    np.float64,
    st.tuples(st.integers(1, 40), st.just(3)),
    elements=st.floats(-1e6, 1e6) | st.just(np.nan),
)


def stats_of(values: Floats, *cuts: int) -> NumberStats:
    stats = NumberStats(values.shape[1])
    for block in np.split(values, sorted(cuts)):
        stats.add(block)
    return stats


@given(tables, st.lists(st.integers(0, 40), max_size=3))
def test_every_figure_is_numpys_however_the_rows_come(values: Floats, cuts: list[int]) -> None:
    stats = stats_of(values, *cuts)

    assert stats.rows == len(values)
    for column, numbers in enumerate(values.T):
        present = numbers[~np.isnan(numbers)]
        assert stats.moments.counts[column] == len(present)
        if len(present) == 0:
            continue
        logarithms = np.sign(present) * np.log1p(np.abs(present))
        close = {"rtol": 1e-9, "atol": 1e-6}
        np.testing.assert_allclose(stats.moments.means[column], present.mean(), **close)
        np.testing.assert_allclose(stats.moments.deviations[column], present.std(), **close)
        np.testing.assert_allclose(stats.log_moments.means[column], logarithms.mean(), **close)
        np.testing.assert_allclose(stats.log_moments.deviations[column], logarithms.std(), **close)
        ranked = np.sort(present)
        assert stats.percentiles(column, np.array([0.0, 1.0])).tolist() == [ranked[0], ranked[-1]]
        ninetyfifth = ranked[int(np.ceil(0.95 * len(ranked))) - 1]
        assert stats.percentiles(column, np.array([0.95])).tolist() == [ninetyfifth]


def test_deviation_of_large_numbers_close_together_is_exact() -> None:
    """A sum of squares would have lost all digits."""
    values = 1.6e9 + np.arange(1000.0).reshape(-1, 1)

    stats = stats_of(values, 7, 500)

    assert stats.moments.deviations[0] == pytest.approx(values.std(), rel=1e-12)


def test_column_without_numbers_is_counted_as_missing() -> None:
    stats = stats_of(np.full((5, 1), np.nan), 2)

    assert stats.moments.counts.tolist() == [0]
    assert stats.moments.deviations.tolist() == [0.0]
    assert (stats.minima[0], stats.maxima[0]) == (np.inf, -np.inf)


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(column_stats, "MAX_SAMPLE", 1000)
    return 1000


def test_percentiles_of_a_sample_have_the_standard_error_that_is_stated(small_sample: int) -> None:
    rng = np.random.default_rng(1)
    values = rng.permuted(np.tile(np.arange(40_000.0).reshape(-1, 1), 60), axis=0)
    stats = stats_of(values, *range(700, 40_000, 700))

    found = [stats.percentiles(column, np.array([0.95]))[0] / 40_000 for column in range(60)]

    assert stats_of(values[:small_sample], 700).is_exact
    # The rows are the same for all columns, their numbers are not.
    assert not stats.is_exact
    assert abs(np.mean(found) - 0.95) < 0.004
    assert np.std(found) == pytest.approx(np.sqrt(0.95 * 0.05 / small_sample), rel=0.3)


def test_sample_does_not_depend_on_the_blocks(small_sample: int) -> None:
    values = np.random.default_rng(2).normal(size=(20_000, 1))
    shares = np.linspace(0.0, 1.0, 11)

    expected = stats_of(values).percentiles(0, shares)

    for cuts in ([1], [999, 1000, 1001], list(range(100, 20_000, 100))):
        np.testing.assert_array_equal(stats_of(values, *cuts).percentiles(0, shares), expected)


def test_extremes_are_exact_also_of_a_sample(small_sample: int) -> None:
    values = np.ones((50_000, 1))
    values[[777, 41_234], 0] = [-5.0, 900.0]

    assert stats_of(values, 3000).percentiles(0, np.array([0.0, 0.5, 1.0])).tolist() == [-5, 1, 900]


def test_number_too_rare_for_the_sample_is_found(small_sample: int) -> None:
    values = np.full((50_000, 1), np.nan)
    values[4, 0] = 3.0

    assert stats_of(values).percentiles(0, np.array([0.95])).tolist() == [3.0]


def counted(*blocks: NDArray[np.uint64]) -> ValueCounts:
    values = ValueCounts()
    for block in blocks:
        values.add(block)
        values.top(1)  # merges also few
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
    keys = np.arange(column_stats.MAX_EXACT, dtype=np.uint64)

    values = counted(keys, keys[:3])

    assert values.is_exact
    assert values.num_distinct == column_stats.MAX_EXACT
    assert values.top(4) == [(0, 2), (1, 2), (2, 2), (3, 1)]


@pytest.mark.parametrize("num_keys", [70_000, 300_000])
def test_many_keys_are_estimated_within_four_standard_errors(num_keys: int) -> None:
    keys = np.random.default_rng(num_keys).integers(0, 2**64, num_keys, dtype=np.uint64)

    values = counted(keys, keys)

    assert not values.is_exact
    assert abs(values.num_distinct / num_keys - 1) < 4 * 0.0081


def test_estimate_has_the_standard_error_that_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the whole range, which is where uncorrected estimators fail: from few keys on."""
    monkeypatch.setattr(column_stats, "MAX_EXACT", 1 << 8)
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
    monkeypatch.setattr(column_stats, "MAX_EXACT", 1 << 8)
    rng = np.random.default_rng(1)
    frequent = np.repeat(np.arange(5, dtype=np.uint64), [9000, 8000, 7000, 6000, 5000])
    keys = np.concatenate([frequent, rng.integers(10, 2**63, 20_000, dtype=np.uint64)])
    rng.shuffle(keys)

    values = counted(*np.array_split(keys, 7))

    assert 0 < values.undercount <= 2 * len(keys) / column_stats.MAX_EXACT
    for (key, count), (expected_key, expected) in zip(
        values.top(5), expected_top(keys.tolist(), 5), strict=True
    ):
        assert key == expected_key
        assert expected - values.undercount <= count <= expected


def test_every_purge_is_taken_off_a_key_that_is_there_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(column_stats, "MAX_EXACT", 1 << 8)
    early = np.zeros(3000, np.uint64)

    values = counted(early, np.arange(1, 20_000, dtype=np.uint64))

    assert values.top(1) == [(0, 3000 - values.undercount)]
