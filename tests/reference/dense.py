"""Numbers as the model sees them, one at a time in float64."""

import math

from ctr_ps.ctr_model.schema.dense_column import DenseColumn


def seen(x: float, column: DenseColumn) -> float:
    if math.isnan(x):
        return column.missing
    if column.transform == "quantile":
        return rank(x, column.boundaries)
    if column.transform == "min_max":
        assert column.min is not None
        assert column.max is not None
        return (x - column.min) / (column.max - column.min)
    fx = math.copysign(math.log1p(abs(x)), x) if column.transform == "log1p" else x
    return (fx - column.shift) / column.scale


def rank(x: float, boundaries: tuple[float, ...]) -> float:
    """Counts the boundaries up to x, and interpolates linearly to the next."""
    count = sum(boundary <= x for boundary in boundaries)
    if count == 0:
        return 0.0
    if count == len(boundaries):
        return 1.0
    low, high = boundaries[count - 1], boundaries[count]
    return (count - 1 + (x - low) / (high - low)) / (len(boundaries) - 1)
