"""Statistics of numbers against plain numpy over all rows at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from ctr_ps.ps_worker.extras.data_tools.profiling import number_stats
from ctr_ps.ps_worker.extras.data_tools.profiling.number_stats import NumberStats

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
    monkeypatch.setattr(number_stats, "MAX_SAMPLE", 1000)
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
