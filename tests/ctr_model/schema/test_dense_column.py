"""Dense columns: their settings, and the scaling of numbers."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.schema.dense_column import DenseColumn, DenseScaling, SchemaError
from tests.reference.dense import seen

COLUMNS = [
    DenseColumn(name="age"),
    DenseColumn(name="price", transform="log1p", shift=-0.5, scale=2.5, missing=-1.0),
    DenseColumn(name="visits", transform="min_max", min=-3.0, max=600.0, missing_indicator=True),
    DenseColumn(name="views", transform="quantile", boundaries=(0.0, 0.0, 1.5), missing=0.5),
]


def test_only_the_settings_of_the_transform_are_written() -> None:
    written = [list(column.to_dict()) for column in COLUMNS]

    assert written == [
        ["name", "transform", "shift", "scale", "missing"],
        ["name", "transform", "shift", "scale", "missing"],
        ["name", "transform", "min", "max", "missing", "missing_indicator"],
        ["name", "transform", "boundaries", "missing"],
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"transform": "log"}, "'log', expected one of none, log1p, min_max, quantile"),
        ({"scale": 0}, "scale is 0"),
        ({"shift": math.nan}, "shift is nan, not finite"),
        ({"shift": 10**400}, "shift is an integer too large for a float64"),
        ({"missing": 1e39}, "missing is 1e\\+39, expected a number that fits a float32"),
        ({"shift": "1"}, "shift is '1', expected a number"),
        ({"missing": True}, "missing is True, expected a number"),
        ({"missing_indicator": 1}, "missing_indicator is 1, expected true or false"),
        ({"min": 1.0}, "min is 1.0, but transform 'none' uses only shift and scale"),
        (
            {"transform": "log1p", "boundaries": [1]},
            r"boundaries is \(1.0,\), but transform 'log1p'",
        ),
        (
            {"transform": "min_max", "min": 0, "max": 1, "scale": 2},
            "scale is 2.0, but .*min and max",
        ),
        ({"transform": "min_max", "min": 0}, "needs min and max, and max is missing"),
        ({"transform": "min_max", "max": 0}, "needs min and max, and min is missing"),
        (
            {"transform": "min_max", "min": 5, "max": 5},
            "min is 5.0 and max is 5.0, expected a larger",
        ),
        ({"transform": "min_max", "min": -1e308, "max": 1e308}, "with a finite difference"),
        ({"transform": "min_max", "min": -math.inf, "max": 0}, "min is -inf, not finite"),
        ({"transform": "min_max", "min": None, "max": 0}, "min is None, expected a number"),
        ({"transform": "quantile"}, r"boundaries are \[\], expected at least two"),
        ({"transform": "quantile", "boundaries": [2, 2]}, r"\[2.0, 2.0\], expected at least two"),
        ({"transform": "quantile", "boundaries": [0, 2, 1]}, "boundary 1.0 follows 2.0"),
        ({"transform": "quantile", "boundaries": [0, math.inf]}, "boundary inf follows 0.0"),
        ({"transform": "quantile", "boundaries": [math.nan, 1]}, "boundary 1.0 follows nan"),
        ({"transform": "quantile", "boundaries": 3}, "boundaries is 3, expected a list"),
        ({"transform": "quantile", "boundaries": [0, "1"]}, "boundary is '1', expected a number"),
    ],
)
def test_wrong_setting_is_refused_with_column_and_value(
    entry: dict[str, object], message: str
) -> None:
    with pytest.raises(SchemaError, match=f"dense column 'visits': .*{message}"):
        DenseColumn.from_dict({"name": "visits"} | entry)


SCALED = (
    DenseColumn(name="none", shift=10.0, scale=40.0),
    DenseColumn(name="log1p", transform="log1p", shift=0.5, scale=2.0, missing=-3.0),
    DenseColumn(name="min_max", transform="min_max", min=-3.0, max=600.0, missing=0.25),
    DenseColumn(name="quantile", transform="quantile", boundaries=(-2.0, 0.0, 0.0, 0.5, 1e6)),
)
NAMES = [column.name for column in SCALED]

numbers = st.one_of(
    st.integers(-3, 1030).map(float),  # around the ends of what is looked up
    st.floats(-1e9, 1e9),
    st.just(math.nan),
)


def scale(column: DenseColumn, *values: float) -> list[float]:
    return DenseScaling([column]).scale(np.array([values]).T)[:, 0].tolist()


@given(st.lists(st.tuples(*[numbers] * len(SCALED)), min_size=1))
def test_every_number_is_seen_as_its_column_says(rows: list[tuple[float, ...]]) -> None:
    expected = [[seen(x, column) for x, column in zip(row, SCALED, strict=True)] for row in rows]

    scaled = DenseScaling(SCALED).scale(np.array(rows))

    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, np.array(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("column", SCALED, ids=NAMES)
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

    expected = DenseScaling(SCALED).scale(values)

    for same in (np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2]):
        np.testing.assert_array_equal(DenseScaling(SCALED).scale(same), expected)


def test_no_columns_and_no_rows_are_scaled_to_nothing() -> None:
    assert DenseScaling([]).scale(np.empty((3, 0))).shape == (3, 0)
    assert DenseScaling(SCALED).scale(np.empty((0, 4))).shape == (0, 4)


@pytest.mark.parametrize("shape", [(2, 3), (2, 5), (4,)])
def test_another_number_of_columns_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected 4 columns"):
        DenseScaling(SCALED).scale(np.zeros(shape))


def test_threads_may_share_a_scaling_from_its_first_use_on() -> None:
    scaling = DenseScaling(SCALED)
    values = np.random.default_rng(1).integers(0, 2000, (500, 4)).astype(np.float64)
    expected = DenseScaling(SCALED).scale(values).tobytes()
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
