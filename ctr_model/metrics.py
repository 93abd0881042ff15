"""Metrics as sums that can be merged over batches, threads and workers.

AUC is computed from histograms of the predictions for clicks and non-clicks:

    AUC = sum over cells of clicks[i] * (others below i + others[i] / 2) / (all clicks * all others)

the area by the trapezoidal rule; predictions in one cell count as ties. Cells are of the bits of a float32,
which ascend with it, as positions from 0 to 2^31:

    position(p) = bits(p) if p <= 1/2 else 2 bits(1/2) - bits(1 - p)

so they are as fine towards 1 as towards 0, where click rates are. A cell drops the fewest low bits with which
the lowest and the highest prediction fit into `CELLS` cells: predictions in a band of 0.4 % all differ, those
from 10^-6 to 1 - 10^-6 if they differ by 0.2 %. The number of bits depends on these two predictions only, so
metrics merged over workers are those of all examples.

A weight w counts an example w times in every sum and histogram, but not in the number of examples.
"""

import math
from collections import deque
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel

CELLS = 2**15
SLIDING_WINDOW = 20

_SMALLEST_PROBABILITY = 1e-7

Floats = NDArray[np.float32]

_NO_WEIGHTS: Floats = np.empty(0, np.float32)

_HALF = int(np.float32(0.5).view(np.int32))
_LAST = 2 * _HALF  # the position of 1
_BITS_OF_ONE = int(np.float32(1).view(np.uint32))

# Positions in the vector of sums.
(
    _LOG_LOSS,
    _ABSOLUTE,
    _SQUARED,
    _PREDICTED,
    _CLICKS,
    _CORRECT,
    _WEIGHT,
    _EXAMPLES,
    _NUM_SUMS,
) = range(9)


@kernel
def _position(p: np.float32) -> np.int64:
    """Returns the position of a probability other than -0."""
    if p <= np.float32(0.5):
        return np.int64(np.float32(p).view(np.int32))
    return np.int64(_LAST) - np.int64(np.float32(np.float32(1) - p).view(np.int32))


@kernel
def _add(
    labels: Floats,
    probabilities: Floats,
    weights: Floats,
    shift: int,
    first: int,
    histograms: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    for b in range(labels.size):
        p = np.float64(probabilities[b])
        weight = np.float64(weights[b]) if weights.size else 1.0
        clicked = labels[b] > np.float32(0.5)
        cell = (_position(probabilities[b]) >> shift) - first
        histograms[1 if clicked else 0, cell] += weight
        bounded = min(max(p, _SMALLEST_PROBABILITY), 1.0 - _SMALLEST_PROBABILITY)
        sums[_LOG_LOSS] -= weight * (math.log(bounded) if clicked else math.log1p(-bounded))
        error = p - (1.0 if clicked else 0.0)
        sums[_ABSOLUTE] += weight * abs(error)
        sums[_SQUARED] += weight * error * error
        sums[_PREDICTED] += weight * p
        sums[_CLICKS] += weight * clicked
        sums[_CORRECT] += weight * ((p >= 0.5) == clicked)
        sums[_WEIGHT] += weight
        sums[_EXAMPLES] += 1


class _Frame(NamedTuple):
    """The cells of positions from `lowest` to `highest`; empty if `highest` is less."""

    lowest: int
    highest: int

    @property
    def shift(self) -> int:
        shift = max(0, max(0, self.highest - self.lowest).bit_length() - CELLS.bit_length())
        while (self.highest >> shift) - (self.lowest >> shift) >= CELLS:
            shift += 1
        return shift

    @property
    def first(self) -> int:
        return self.lowest >> self.shift

    @property
    def size(self) -> int:
        return max(0, (self.highest >> self.shift) - self.first + 1)

    def with_positions(self, lowest: int, highest: int) -> "_Frame":
        return _Frame(min(self.lowest, lowest), max(self.highest, highest))


_NO_FRAME = _Frame(_LAST + 1, -1)


def auc_of_histograms(
    clicks: NDArray[np.int64] | NDArray[np.float64],
    others: NDArray[np.int64] | NDArray[np.float64],
) -> float:
    """Returns the AUC for numbers of clicks and others by ascending prediction; nan with one class only."""
    pairs = float(others.sum()) * float(clicks.sum())
    if not pairs:
        return math.nan
    below = np.cumsum(others) - others / 2  # [buckets]
    return float((clicks * below).sum()) / pairs


def _frame_of(bounds: NDArray[np.float64]) -> _Frame:
    return _Frame(-int(bounds[0]), int(bounds[1]))


class ClickMetrics:
    """Sums over labelled predictions, and metrics computed from them. Not thread-safe."""

    def __init__(self) -> None:
        self._frame = _NO_FRAME
        self._shift = self._first = 0  # of the frame
        self._low, self._high = np.uint32(2**32 - 1), np.uint32(0)  # bits that were added, in it
        self._histograms = np.zeros((2, 0))  # others, clicks
        self._sums = np.zeros(_NUM_SUMS)

    def add(self, labels: Floats, probabilities: Floats, weights: Floats | None = None) -> None:
        """Adds examples, or none on an error.

        Labels are 1 for a click, else 0; weights are finite and at least 0, by default 1. Raises ValueError
        if a probability is not in [0, 1], or the lengths differ.
        """
        if labels.shape != probabilities.shape:
            raise ValueError(f"{probabilities.size} predictions for {labels.size} labels")
        if weights is not None and weights.shape != labels.shape:
            raise ValueError(f"{weights.size} weights for {labels.size} labels")
        if not labels.size:
            return
        # As unsigned numbers, the bits of other numbers than probabilities are above those of 1.
        bits = probabilities.view(np.uint32)
        low, high = bits.min(), bits.max()
        if high > _BITS_OF_ONE:
            probabilities = probabilities + np.float32(0)  # of -0: 0
            bits = probabilities.view(np.uint32)
            low, high = bits.min(), bits.max()
            if high > _BITS_OF_ONE:
                raise ValueError("a predicted probability is not in [0, 1]: the model has diverged")
        if low < self._low or high > self._high:
            self._low, self._high = min(low, self._low), max(high, self._high)
            lowest = int(_position(low.view(np.float32)))
            highest = int(_position(high.view(np.float32)))
            self._widen(self._frame.with_positions(lowest, highest))
        weights = _NO_WEIGHTS if weights is None else np.require(weights, np.float32, ["C", "W"])
        _add(labels, probabilities, weights, self._shift, self._first, self._histograms, self._sums)

    def copy(self) -> "ClickMetrics":
        """Returns independent metrics of the same examples."""
        copied = ClickMetrics()
        copied.merge(self)
        return copied

    def without(self, earlier: "ClickMetrics") -> "ClickMetrics":
        """Returns the metrics of the examples since `earlier`, a copy of this one."""
        rest = self.copy()
        rest._histograms -= earlier._in_frame(self._frame)
        rest._sums -= earlier._sums
        return rest

    def merge(self, other: "ClickMetrics") -> None:
        """Adds the examples of another worker or thread."""
        self._widen(self._frame.with_positions(*other._frame))
        self._histograms += other._in_frame(self._frame)
        self._sums += other._sums

    def bounds(self) -> NDArray[np.float64]:
        """Returns float64[2], the input of `to_vector`; over workers, take the maximum of each."""
        return np.array([-self._frame.lowest, self._frame.highest], np.float64)

    def to_vector(self, bounds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns all sums, up to 2 * CELLS + 8 float64; vectors with the same bounds can be added."""
        cells = self._in_frame(_frame_of(bounds))
        return np.concatenate([cells.reshape(-1), self._sums])

    @classmethod
    def from_vector(cls, vector: NDArray[np.float64], bounds: NDArray[np.float64]) -> Self:
        """Returns the metrics of a sum of `to_vector(bounds)` results; ValueError for another length."""
        metrics = cls()
        metrics._widen(_frame_of(bounds))
        cells = metrics._histograms.size
        if vector.shape != (cells + _NUM_SUMS,):
            raise ValueError(f"metrics are {cells + _NUM_SUMS} numbers, got shape {vector.shape}")
        metrics._histograms[:] = vector[:cells].reshape(2, -1)
        metrics._sums[:] = vector[cells:]
        return metrics

    def _widen(self, frame: _Frame) -> None:
        """Moves the histograms to a frame that contains the current one."""
        self._histograms = self._in_frame(frame)
        self._frame, self._shift, self._first = frame, frame.shift, frame.first

    def _in_frame(self, frame: _Frame) -> NDArray[np.float64]:
        """Returns the histograms by the cells of `frame`, clipped to its first and last; only to be read."""
        if frame == self._frame:
            return self._histograms
        histograms = np.zeros((2, frame.size))
        if self._frame != _NO_FRAME and frame.size:
            cells = np.arange(self._first, self._first + self._frame.size)
            cells = (cells << self._shift >> frame.shift) - frame.first
            np.clip(cells, 0, frame.size - 1, out=cells)
            for own, each in zip(self._histograms, histograms, strict=True):
                each[:] = np.bincount(cells, own, frame.size)
        return histograms

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(self._sums[_EXAMPLES])

    @property
    def weight(self) -> float:
        """Sum of the weights of the examples."""
        return float(self._sums[_WEIGHT])

    @property
    def clicks(self) -> float:
        """Sum of the weights of clicked examples."""
        return float(self._sums[_CLICKS])

    @property
    def correct(self) -> float:
        """Number of examples on the right side of 0.5."""
        return float(self._sums[_CORRECT])

    @property
    def absolute_error(self) -> float:
        """Sum over examples of |label - prediction|."""
        return float(self._sums[_ABSOLUTE])

    @property
    def squared_error(self) -> float:
        """Sum over examples of (label - prediction)^2."""
        return float(self._sums[_SQUARED])

    def auc(self) -> float:
        """Returns the area under the ROC curve; nan with one class only."""
        others, clicks = self._histograms
        return auc_of_histograms(clicks, others)

    def log_loss(self) -> float:
        """Returns the mean log loss, predictions bounded away from 0 and 1 by 1e-7; nan if empty."""
        return self._mean(_LOG_LOSS)

    def base_log_loss(self) -> float:
        """Returns the mean log loss of always predicting the click rate; nan with one class only."""
        rate = self._mean(_CLICKS)
        if not 0.0 < rate < 1.0:
            return math.nan
        return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))

    def normalized_entropy(self) -> float:
        """Returns log loss over that of the click rate (He et al., ADKDD 2014); nan with one class only."""
        return self.log_loss() / self.base_log_loss()

    def accuracy(self) -> float:
        """Returns the share of examples on the right side of 0.5; nan if empty."""
        return self._mean(_CORRECT)

    def calibration(self) -> float:
        """Returns predicted clicks over actual clicks; nan without clicks."""
        clicks = self._sums[_CLICKS]
        return float(self._sums[_PREDICTED] / clicks) if clicks else math.nan

    def _mean(self, index: int) -> float:
        weight = self._sums[_WEIGHT]
        return float(self._sums[index] / weight) if weight else math.nan


class SlidingMetrics:
    """Metrics of the last `window` batches. Not thread-safe."""

    def __init__(self, window: int = SLIDING_WINDOW) -> None:
        self.window = window
        self._batches: deque[tuple[Floats, Floats, Floats | None]] = deque(maxlen=window)

    def add(self, labels: Floats, probabilities: Floats, weights: Floats | None = None) -> None:
        """Adds a batch and drops the oldest one."""
        self._batches.append((labels, probabilities.copy(), weights))

    def metrics(self) -> ClickMetrics:
        """Returns the metrics of the window."""
        metrics = ClickMetrics()
        for batch in self._batches:
            metrics.add(*batch)
        return metrics
