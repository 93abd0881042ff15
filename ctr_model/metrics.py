"""Metrics as sums that can be merged over batches, threads and workers.

AUC is computed from histograms of the predictions for clicks and non-clicks, with `THRESHOLDS` equal buckets:

    AUC = sum over buckets of clicks[i] * (others below i + others[i] / 2) / (all clicks * all others)

the area by the trapezoidal rule; predictions in one bucket count as ties. (Paddle's tutorials use 4096
thresholds, too.)

Examples may have weights: each counts as that many in every sum and histogram, but in the number of examples.
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

_NO_WEIGHTS: Floats = np.empty(0, np.float32)

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
def _add(
    labels: Floats,
    probabilities: Floats,
    weights: Floats,
    histograms: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    buckets = histograms.shape[1]
    for b in range(labels.size):
        p = np.float64(probabilities[b])
        weight = np.float64(weights[b]) if weights.size else 1.0
        clicked = labels[b] > np.float32(0.5)
        bucket = min(np.int64(p * buckets), buckets - 1)
        histograms[1 if clicked else 0, bucket] += weight
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
        self._histograms = np.zeros((2, THRESHOLDS))  # others, clicks
        self._sums = np.zeros(_NUM_SUMS)

    def add(self, labels: Floats, probabilities: Floats, weights: Floats | None = None) -> None:
        """Adds examples; on an error none of them.

        Args:
            labels: float32[B], 1 for a click, else 0.
            probabilities: float32[B], of a click.
            weights: float32[B], finite and at least 0; None: each example has weight 1.

        Raises:
            ValueError: If a probability is not in [0, 1], or the lengths differ.
        """
        if labels.shape != probabilities.shape:
            raise ValueError(f"{labels.size} labels came with {probabilities.size} predictions")
        if not np.all((probabilities >= 0) & (probabilities <= 1)):
            raise ValueError("a predicted probability is not in [0, 1]: the model has diverged")
        if weights is not None and weights.shape != labels.shape:
            raise ValueError(f"{labels.size} labels came with {weights.size} weights")
        weights = _NO_WEIGHTS if weights is None else np.require(weights, np.float32, ["C", "W"])
        _add(labels, probabilities, weights, self._histograms, self._sums)

    def merge(self, other: "ClickMetrics") -> None:
        """Adds the examples of another worker or thread."""
        self._histograms += other._histograms
        self._sums += other._sums

    def to_vector(self) -> NDArray[np.float64]:
        """Returns all sums as float64[2 * THRESHOLDS + 8]; vectors of workers can be added."""
        return np.concatenate([self._histograms.reshape(-1), self._sums])

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
    def weight(self) -> float:
        """Sum of the weights of the examples: their number where they have none."""
        return float(self._sums[_WEIGHT])

    @property
    def clicks(self) -> float:
        """Sum of the weights of clicked examples: their number where they have none."""
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
