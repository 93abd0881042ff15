"""Metrics as sums that can be merged over batches, threads and workers.

AUC is computed from histograms of the predictions for clicks and non-clicks, with `THRESHOLDS` equal buckets:

    AUC = sum over buckets of clicks[i] * (others below i + others[i] / 2) / (all clicks * all others)

the area by the trapezoidal rule; predictions in one bucket count as ties. (Paddle's tutorials use 4096
thresholds, too.)
"""

import math
from collections import deque
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_model.jit import kernel

THRESHOLDS = 4096
SLIDING_WINDOW = 20

_SMALLEST_PROBABILITY = 1e-7

Floats = NDArray[np.float32]

# Positions in the vector of sums.
_LOG_LOSS, _ABSOLUTE, _SQUARED, _PREDICTED, _CLICKS, _CORRECT, _EXAMPLES, _NUM_SUMS = range(8)


@kernel
def _add(
    labels: Floats, probabilities: Floats, histograms: NDArray[np.int64], sums: NDArray[np.float64]
) -> None:
    buckets = histograms.shape[1]
    for b in range(labels.size):
        p = np.float64(probabilities[b])
        clicked = labels[b] > np.float32(0.5)
        bucket = min(np.int64(p * buckets), buckets - 1)
        histograms[1 if clicked else 0, bucket] += 1
        bounded = min(max(p, _SMALLEST_PROBABILITY), 1.0 - _SMALLEST_PROBABILITY)
        sums[_LOG_LOSS] -= math.log(bounded) if clicked else math.log1p(-bounded)
        error = p - (1.0 if clicked else 0.0)
        sums[_ABSOLUTE] += abs(error)
        sums[_SQUARED] += error * error
        sums[_PREDICTED] += p
        sums[_CLICKS] += clicked
        sums[_CORRECT] += (p >= 0.5) == clicked
        sums[_EXAMPLES] += 1


def auc_of_histograms(
    clicks: NDArray[np.int64] | NDArray[np.float64],
    others: NDArray[np.int64] | NDArray[np.float64],
) -> float:
    """Returns the AUC of histograms of predictions; nan with one class only.

    Args:
        clicks: [buckets], numbers of clicked examples by ascending prediction.
        others: [buckets], numbers of examples without a click.
    """
    pairs = float(others.sum()) * float(clicks.sum())
    if not pairs:
        return math.nan
    below = np.cumsum(others) - others / 2  # [buckets]
    return float(clicks @ below) / pairs


class ClickMetrics:
    """Sums over labelled predictions, and metrics computed from them. Not thread-safe."""

    def __init__(self) -> None:
        self._histograms = np.zeros((2, THRESHOLDS), np.int64)  # others, clicks
        self._sums = np.zeros(_NUM_SUMS)

    def add(self, labels: Floats, probabilities: Floats) -> None:
        """Adds examples; on an error none of them.

        Args:
            labels: float32[B], 1 for a click, else 0.
            probabilities: float32[B], of a click.

        Raises:
            ValueError: If a probability is not in [0, 1], or the lengths differ.
        """
        if labels.shape != probabilities.shape:
            raise ValueError(f"{labels.size} labels came with {probabilities.size} predictions")
        if not np.all((probabilities >= 0) & (probabilities <= 1)):
            raise ValueError("a predicted probability is not in [0, 1]: the model has diverged")
        _add(labels, probabilities, self._histograms, self._sums)

    def merge(self, other: "ClickMetrics") -> None:
        """Adds the examples of another worker or thread."""
        self._histograms += other._histograms
        self._sums += other._sums

    def to_vector(self) -> NDArray[np.float64]:
        """Returns all sums as float64[2 * THRESHOLDS + 7]; vectors of workers can be added."""
        return np.concatenate([self._histograms.reshape(-1).astype(np.float64), self._sums])

    @classmethod
    def from_vector(cls, vector: NDArray[np.float64]) -> Self:
        """Returns the metrics of a sum of `to_vector` results.

        Raises:
            ValueError: If `vector` has another length, for example from another version.
        """
        if vector.shape != (2 * THRESHOLDS + _NUM_SUMS,):
            raise ValueError(
                f"metrics are {2 * THRESHOLDS + _NUM_SUMS} numbers, got shape {vector.shape}"
            )
        metrics = cls()
        metrics._histograms[:] = vector[: 2 * THRESHOLDS].reshape(2, THRESHOLDS)
        metrics._sums[:] = vector[2 * THRESHOLDS :]
        return metrics

    @property
    def examples(self) -> int:
        """Number of examples."""
        return int(self._sums[_EXAMPLES])

    @property
    def correct(self) -> int:
        """Number of examples on the right side of 0.5."""
        return int(self._sums[_CORRECT])

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

    def accuracy(self) -> float:
        """Returns the share of examples on the right side of 0.5; nan if empty."""
        return self._mean(_CORRECT)

    def calibration(self) -> float:
        """Returns predicted clicks over actual clicks; nan without clicks."""
        clicks = self._sums[_CLICKS]
        return float(self._sums[_PREDICTED] / clicks) if clicks else math.nan

    def _mean(self, index: int) -> float:
        return float(self._sums[index] / self._sums[_EXAMPLES]) if self.examples else math.nan


class SlidingMetrics:
    """Metrics of the last `window` batches. Not thread-safe."""

    def __init__(self, window: int = SLIDING_WINDOW) -> None:
        self.window = window
        self._batches: deque[tuple[Floats, Floats]] = deque(maxlen=window)

    def add(self, labels: Floats, probabilities: Floats) -> None:
        """Adds a batch and drops the oldest one."""
        self._batches.append((labels, probabilities.copy()))

    def metrics(self) -> ClickMetrics:
        """Returns the metrics of the window."""
        metrics = ClickMetrics()
        for labels, probabilities in self._batches:
            metrics.add(labels, probabilities)
        return metrics
