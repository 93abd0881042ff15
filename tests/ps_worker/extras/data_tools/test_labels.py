"""Columns that tell the label: known after the click, or as good as it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ctr_ps.ps_worker.extras.data_tools.labels import predicts_label

ROWS = 4000
RNG = np.random.default_rng(1)
CLICKED = RNG.random(ROWS) < 0.1
NOISE = RNG.random(ROWS)


def where_clicked(value: Any, other: Any) -> list[Any]:
    return [value if clicked else other for clicked in CLICKED]


def of_each(make: Callable[[bool, float], Any]) -> list[Any]:
    """Returns a value for each row, made of whether it was clicked and a number of [0, 1)."""
    return [make(*row) for row in zip(CLICKED, NOISE, strict=True)]


LEAKS: dict[str, tuple[list[Any], bool]] = {
    "the label": (CLICKED.tolist(), True),
    "its opposite": ((~CLICKED).tolist(), True),
    "the label as a name": (where_clicked(1, 0), False),
    "dwell": ((CLICKED * NOISE).tolist(), True),
    "dwell or none": (where_clicked(3.5, None), True),
    "longer dwell": ((CLICKED + NOISE * 0.9).tolist(), True),
    "missing in clicks": (of_each(lambda click, noise: None if click else noise), True),
    "purchase": ((CLICKED & (NOISE < 0.2)).tolist(), True),
    "page after the click": (
        of_each(lambda click, noise: f"{noise:.2f}" if click else None),
        False,
    ),
    "items bought": (where_clicked(["a"], []), False),
    "action": (
        of_each(
            lambda click, noise: (
                ("buy" if noise < 0.1 else "click")
                if click
                else ("view" if noise < 0.5 else "skip")
            )
        ),
        False,
    ),
}
FEATURES: dict[str, tuple[list[Any], bool]] = {
    "noise": (NOISE.tolist(), True),
    "good number": ((CLICKED + RNG.normal(size=ROWS)).tolist(), True),
    "rare value": ([1.0 if row == CLICKED.argmax() else 0.0 for row in range(ROWS)], True),
    "users": ([f"u{row}" for row in range(ROWS)], False),
    "repeated users": (RNG.integers(0, 1500, ROWS).tolist(), False),
    "lists": ([["a"] * int(n * 5) for n in NOISE], False),
    "never clicked": (of_each(lambda click, noise: "x" if click or noise < 0.5 else "y"), False),
}


@pytest.mark.parametrize("name", LEAKS)
def test_columns_that_tell_the_label_are_found(name: str) -> None:
    values, is_number = LEAKS[name]
    labels = CLICKED.astype(np.float64)
    labels[:50] = np.nan  # rows without a label do not count

    assert predicts_label(pa.array(values), labels, is_number=is_number)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("click_rate", [0.1, 0.9, 0.995, 0.001])
def test_features_are_no_leaks(name: str, click_rate: float) -> None:
    values, is_number = FEATURES[name]
    labels = CLICKED if click_rate == 0.1 else np.random.default_rng(2).random(ROWS) < click_rate

    assert not predicts_label(pa.array(values), labels.astype(np.float64), is_number=is_number)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_is_predicted_by_nothing(label: float) -> None:
    labels = np.full(ROWS, label)

    assert not predicts_label(pa.array(NOISE), labels, is_number=True)
    assert not predicts_label(pa.array(where_clicked("a", "b")), labels, is_number=False)
