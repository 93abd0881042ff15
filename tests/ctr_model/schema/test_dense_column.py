"""Dense columns: invalid settings, and the round trip through plain values."""

import math

import pytest

from ctr_ps.ctr_model.schema.dense_column import DenseColumn
from ctr_ps.ctr_model.schema.entries import SchemaError

COLUMNS = [
    DenseColumn(name="age"),
    DenseColumn(name="price", transform="log1p", shift=-0.5, scale=2.5, missing=-1.0),
    DenseColumn(name="visits", transform="min_max", min=-3.0, max=600.0, missing_indicator=True),
    DenseColumn(name="views", transform="quantile", boundaries=(0.0, 0.0, 1.5), missing=0.5),
]


@pytest.mark.parametrize("column", COLUMNS, ids=[column.transform for column in COLUMNS])
def test_round_trip_keeps_every_value(column: DenseColumn) -> None:
    assert DenseColumn.from_dict(column.to_dict()) == column


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
        ({"min": 1.0}, "min is 1.0, but transform 'none' takes shift and scale"),
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
