"""What the model sees of numbers: every transform against one number at a time."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.schema.dense_column import DenseColumn
from ctr_ps.ctr_model.schema.dense_scaling import DenseScaling
from tests.reference.dense import seen

COLUMNS = (
    DenseColumn(name="none", shift=10.0, scale=40.0),
    DenseColumn(name="log1p", transform="log1p", shift=0.5, scale=2.0, missing=-3.0),
    DenseColumn(name="min_max", transform="min_max", min=-3.0, max=600.0, missing=0.25),
    DenseColumn(name="quantile", transform="quantile", boundaries=(-2.0, 0.0, 0.0, 0.5, 1e6)),
)
NAMES = [column.name for column in COLUMNS]

numbers = st.one_of(
    st.integers(-3, 1030).map(float),  # around the ends of what is looked up
    st.floats(-1e9, 1e9),
    st.just(math.nan),
)


def scale(column: DenseColumn, *values: float) -> list[float]:
    return DenseScaling([column]).scale(np.array([values]).T)[:, 0].tolist()


@given(st.lists(st.tuples(*[numbers] * len(COLUMNS)), min_size=1))
def test_every_number_is_seen_as_its_column_says(rows: list[tuple[float, ...]]) -> None:
    expected = [[seen(x, column) for x, column in zip(row, COLUMNS, strict=True)] for row in rows]

    scaled = DenseScaling(COLUMNS).scale(np.array(rows))

    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, np.array(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("column", COLUMNS, ids=NAMES)
def test_looked_up_count_is_seen_as_its_neighbours_are(column: DenseColumn) -> None:
    """A count is looked up, the next float above it is not; both agree as float32."""
    counts = np.arange(3.0, 1024.0)  # above the boundaries, at which the rank jumps
    just_above = np.nextafter(counts, np.inf)

    np.testing.assert_allclose(
        scale(column, *counts), scale(column, *just_above), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("num_boundaries", [2, 3, 16, 17, 101])
def test_rank_is_numpys_interpolation(num_boundaries: int) -> None:
    rng = np.random.default_rng(num_boundaries)
    boundaries = np.unique(rng.normal(size=num_boundaries))
    column = DenseColumn(name="a", transform="quantile", boundaries=tuple(boundaries.tolist()))
    values = np.concatenate([boundaries, rng.normal(scale=2.0, size=500)])

    expected = np.interp(values, boundaries, np.linspace(0.0, 1.0, len(boundaries)))
    np.testing.assert_allclose(scale(column, *values), expected, rtol=1e-6, atol=1e-9)


def test_indicators_follow_all_numbers_in_the_order_of_their_columns() -> None:
    scaling = DenseScaling(
        [
            DenseColumn(name="a", missing_indicator=True),
            DenseColumn(name="b"),
            DenseColumn(name="c", missing=7.0, missing_indicator=True),
        ]
    )

    scaled = scaling.scale(np.array([[1.0, np.nan, np.nan], [np.nan, 2.0, 3.0]]))

    assert scaling.width == 5
    assert scaled.tolist() == [[1.0, 0.0, 7.0, 0.0, 1.0], [0.0, 2.0, 3.0, 1.0, 0.0]]


def test_numbers_may_lie_in_memory_in_any_way() -> None:
    values = np.random.default_rng(1).normal(size=(6, 4))

    expected = DenseScaling(COLUMNS).scale(values)

    for same in (np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2]):
        np.testing.assert_array_equal(DenseScaling(COLUMNS).scale(same), expected)


def test_no_columns_and_no_rows_are_scaled_to_nothing() -> None:
    assert DenseScaling([]).scale(np.empty((3, 0))).shape == (3, 0)
    assert DenseScaling(COLUMNS).scale(np.empty((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (4,)])
def test_another_number_of_columns_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected 4 columns"):
        DenseScaling(COLUMNS).scale(np.zeros(shape))


def test_threads_may_share_a_scaling_from_its_first_use_on() -> None:
    scaling = DenseScaling(COLUMNS)
    values = np.random.default_rng(1).integers(0, 2000, (500, 4)).astype(np.float64)
    expected = DenseScaling(COLUMNS).scale(values).tobytes()
    start, results = threading.Barrier(4), list[bytes]()

    def work() -> None:
        start.wait(10.0)
        results.append(scaling.scale(values).tobytes())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)

    assert results == [expected] * 4
