"""Scaling of the dense columns of many examples in one kernel."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema.dense_column import DenseColumn

_LINEAR, _LOG1P, _QUANTILE = range(3)

# Most numbers of click logs are small counts: the scaled values of 0, 1, ... below this are precomputed,
# which takes a third of the time for logarithms and a tenth for ranks.
_SMALL = 1024


class DenseScaling:
    """The transforms of dense columns as arrays for the kernel; `width` inputs. Thread-safe."""

    def __init__(self, columns: Sequence[DenseColumn]) -> None:
        spans = np.array([column.span for column in columns], np.float64).reshape(-1, 2)
        has_indicator = np.array([column.missing_indicator for column in columns], np.bool_)
        lengths = [len(column.boundaries) for column in columns]
        self.width = len(columns) + int(has_indicator.sum())
        kinds = {"log1p": _LOG1P, "quantile": _QUANTILE}
        self._kinds = np.array([kinds.get(each.transform, _LINEAR) for each in columns], np.int64)
        self._shifts, self._scales = spans[:, 0].copy(), spans[:, 1].copy()
        self._missing = np.array([column.missing for column in columns], np.float32)
        self._indicators = np.where(has_indicator, len(columns) - 1 + has_indicator.cumsum(), -1)
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self._boundaries = np.array(
            [boundary for column in columns for boundary in column.boundaries], np.float64
        )
        self._small: NDArray[np.float32] | None = None

    def scale(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns float32[N, width] for `values` float64[N, number of columns], nan where missing."""
        if values.ndim != 2 or values.shape[1] != len(self._kinds):
            raise ValueError(
                f"the numbers have shape {values.shape!r}, expected {len(self._kinds)} columns"
            )
        # Lazy, as many schemas never scale. Two threads may both compute it.
        if self._small is None:
            none = np.empty((0, len(self._kinds)), np.float32)
            counts = np.arange(_SMALL, dtype=np.float64).repeat(len(self._kinds))
            scaled = self._scaled(counts.reshape(_SMALL, -1), none)
            self._small = np.ascontiguousarray(scaled[:, : len(self._kinds)])
        return self._scaled(np.ascontiguousarray(values, np.float64), self._small)

    def _scaled(
        self, values: NDArray[np.float64], small: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        scaled = np.empty((len(values), self.width), np.float32)
        _scale(
            values,
            self._kinds,
            self._shifts,
            self._scales,
            self._missing,
            self._indicators,
            self._starts,
            self._boundaries,
            small,
            scaled,
        )
        return scaled


@kernel
def _rank(x: float, boundaries: NDArray[np.float64], start: int, stop: int) -> float:
    """Returns the rank in [0, 1] of x among `boundaries[start:stop]`, ascending."""
    if x < boundaries[start]:
        return 0.0
    if x >= boundaries[stop - 1]:
        return 1.0
    low, high = start, stop - 1  # boundaries[low] <= x < boundaries[high]
    while high - low > 1:
        middle = (low + high) // 2
        if boundaries[middle] <= x:
            low = middle
        else:
            high = middle
    between = (x - boundaries[low]) / (boundaries[high] - boundaries[low])
    return float((low - start + between) / (stop - 1 - start))


@kernel
def _transformed(
    x: float,
    kind: int,
    shift: float,
    scale: float,
    boundaries: NDArray[np.float64],
    start: int,
    stop: int,
) -> np.float32:
    """Returns the model input for x, in a column with `boundaries[start:stop]`."""
    if kind == _LOG1P:
        x = np.copysign(np.log1p(np.abs(x)), x)
    elif kind == _QUANTILE:
        x = _rank(x, boundaries, start, stop)
    return np.float32((x - shift) / scale)


@kernel
def _scale(
    values: NDArray[np.float64],
    kinds: NDArray[np.int64],
    shifts: NDArray[np.float64],
    scales: NDArray[np.float64],
    missing: NDArray[np.float32],
    indicators: NDArray[np.int64],
    starts: NDArray[np.int64],
    boundaries: NDArray[np.float64],
    small: NDArray[np.float32],
    scaled: NDArray[np.float32],
) -> None:
    """Overwrites `scaled` float32[N, width]; `small` float32[n, columns] holds the scaled 0, ..., n - 1."""
    for row in range(len(values)):
        for column in range(len(kinds)):
            x = values[row, column]
            is_missing = np.isnan(x)
            if indicators[column] >= 0:
                scaled[row, indicators[column]] = np.float32(is_missing)
            if is_missing:
                scaled[row, column] = missing[column]
            elif 0.0 <= x < len(small) and x == np.floor(x):
                scaled[row, column] = small[int(x), column]
            else:
                scaled[row, column] = _transformed(
                    x,
                    kinds[column],
                    shifts[column],
                    scales[column],
                    boundaries,
                    starts[column],
                    starts[column + 1],
                )
