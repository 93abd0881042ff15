"""Axes of a chart: which range they show, where ticks are, and how numbers are written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WHOLE_STEPS = (1.0, 2.0, 5.0, 10.0)
_SAME = 1e-8
"""Values are equal on an axis if they differ by less, of the largest or of 1: float32 tells no less apart."""
_OUTLIER_SPANS = 1.5
_FEW = 8


@dataclass(frozen=True, slots=True)
class Axis:
    """Values `low` to `high` along pixels `start` to `end`, with ticks.

    Attributes:
        low: The value at `start`.
        high: The value at `end`, above `low`.
        start: In pixels of the drawing; may be above `end`, as y grows downwards.
        end: Likewise.
        ticks: Values with a tick, ascending.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        start: float,
        end: float,
        *,
        ticks: int = 5,
        is_whole: bool = False,
    ) -> Self:
        """Returns an axis from a tick to a tick that shows all values; from 0 to 1 without any.

        Args:
            values: To be shown.
            start: See `Axis`.
            end: See `Axis`.
            ticks: About how many.
            is_whole: Ticks are whole numbers.
        """
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        largest = max(abs(low), abs(high))
        if high - low <= _SAME * max(largest, 1.0):
            margin = 0.1 * largest if largest > _SAME else 1.0
            low, high = (low - 1, high + 1) if is_whole else (low - margin, high + margin)
        steps = _WHOLE_STEPS if is_whole else _STEPS
        rough = (high - low) / ticks
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(each for each in steps if each * unit >= rough * (1 - 1e-9))
        if is_whole:
            step = max(step, 1.0)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        found = tuple(index * step for index in range(first, last + 1))
        return cls(found[0], found[-1], start, end, found)

    def at(self, value: float) -> float:
        """Returns the pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def labels(self) -> list[str]:
        """Returns the texts of the ticks, all with as many decimals as tell them apart."""
        step = min(right - left for left, right in pairwise(self.ticks))
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if round(step, decimals) != round(step, 12):  # as 2.5 has one more
            decimals += 1
        return [f"{value:,.{decimals}f}".replace("-", "\N{MINUS SIGN}") for value in self.ticks]


def without_outliers(values: Sequence[float]) -> list[float]:
    """Returns the values without those far above the others, such as the losses of a first, untrained model.

    Far is more than 1.5 times the span between the 5th and the 90th percentile above the latter.
    """
    if len(values) < _FEW:
        return list(values)
    ordered = sorted(values)
    low, high = ordered[round(0.05 * (len(ordered) - 1))], ordered[round(0.9 * (len(ordered) - 1))]
    limit = high + _OUTLIER_SPANS * (high - low)
    return [value for value in values if value <= limit]


def shown(value: object) -> str:
    """Returns a figure for people: five significant digits, thousands apart; a dash for a missing one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.5g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def unit_of_bytes(largest: float) -> tuple[str, float]:
    """Returns the binary unit in which a size reads well, and its bytes."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return name, float(1024**power)
    return "bytes", 1.0
