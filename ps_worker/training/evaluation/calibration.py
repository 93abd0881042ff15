"""Predicted and actual click rates by ascending prediction, from a histogram of fixed size.

The bits of a float32 from 0 to 1 ascend with it, so its leading bits number the cells of the histogram. A
cell is as wide as 2^-12 of its predictions. Buckets of about equal numbers of examples are runs of cells:
their borders are within that width of the quantiles, and equal predictions are in one bucket.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ps_worker.training.evaluation.groups import ratio

_DROPPED_BITS = 23 - 12  # of the mantissa
_CELLS = (int(np.float32(1).view(np.uint32)) >> _DROPPED_BITS) + 1


class Calibration:
    """Examples by their predictions, in 20 MB for any number of them. Not thread-safe."""

    def __init__(self) -> None:
        self._examples = np.zeros(_CELLS, np.int64)
        self._weight, self._clicks, self._predicted = np.zeros((3, _CELLS))
        self._lowest = np.ones(_CELLS, np.float32)
        self._highest = np.zeros(_CELLS, np.float32)

    def add(
        self,
        clicked: NDArray[np.bool_],
        probabilities: NDArray[np.float32],
        weights: NDArray[np.float32],
    ) -> None:
        """Counts N examples by their predicted probability of a click, from 0 to 1."""
        positive = probabilities + np.float32(0)  # -0 has a bit that 0 has not
        cells = positive.view(np.uint32) >> np.uint32(_DROPPED_BITS)
        weight = weights.astype(np.float64)
        np.add.at(self._examples, cells, 1)
        np.add.at(self._weight, cells, weight)
        np.add.at(self._clicks, cells, weight * clicked)
        np.add.at(self._predicted, cells, weight * positive)
        np.minimum.at(self._lowest, cells, positive)
        np.maximum.at(self._highest, cells, positive)

    def buckets(self, number: int) -> list[dict[str, Any]]:
        """Returns the figures of up to `number` non-empty buckets, by ascending prediction."""
        cells = np.flatnonzero(self._examples)
        if not cells.size:
            return []
        examples = self._examples[cells]
        middle = np.cumsum(examples) - examples / 2  # of each cell, among all examples
        bucket_of_cell = (middle * number / examples.sum()).astype(np.int64)
        starts = np.flatnonzero(np.diff(bucket_of_cell, prepend=-1))
        sums = (
            np.add.reduceat(array[cells], starts).tolist()
            for array in (self._examples, self._weight, self._predicted, self._clicks)
        )
        lowest = self._lowest[cells[starts]].tolist()
        highest = self._highest[cells[np.append(starts[1:], cells.size) - 1]].tolist()
        return [
            {
                "examples": count,
                "weight": weight,
                "lowest": low,
                "highest": high,
                "predicted": ratio(predicted, weight),
                "click_rate": ratio(clicks, weight),
                "calibration": ratio(predicted, clicks),
            }
            for count, weight, predicted, clicks, low, high in zip(
                *sums, lowest, highest, strict=True
            )
        ]


def calibration_error(buckets: list[dict[str, Any]]) -> float:
    """Returns the mean distance of predicted and actual click rate over buckets, by weight; nan without any.

    The expected calibration error: Naeini, Cooper and Hauskrecht, "Obtaining Well Calibrated Probabilities
    Using Bayesian Binning", 2015.
    """
    weighing = [each for each in buckets if each["weight"] > 0]
    distances = sum(
        each["weight"] * abs(each["predicted"] - each["click_rate"]) for each in weighing
    )
    return ratio(distances, sum(each["weight"] for each in weighing))
