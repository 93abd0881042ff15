"""Synthetic click logs from a known model, in Criteo's layout.

A click is drawn with probability

    sigmoid(bias + gain * (sum over slots of weight[slot, value] + sum over numbers of weight * x))

where x is a number as `criteo_schema` scales it (0 where missing) and all weights are normal. Values follow
Zipf's law over vocabularies that grow geometrically from slot to slot, so there are slots of a few values and
slots with a long tail. Bias and gain are set so that for every seed the click rate is `CLICK_RATE` and the
standard deviation of the logit `LOGIT_DEVIATION`. Every model of clicks contains this linear one and none can
beat it, so its own AUC and log loss are the best possible.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import criteo_schema

NUM_SLOTS = 26
ZIPF_EXPONENT = 1.1
CLICK_RATE = 0.22
LOGIT_DEVIATION = 1.5

_SMALLEST_VOCABULARY = 4
_LARGEST_VOCABULARY = 4_000
_MISSING_COLUMNS = 1 / 3  # share of the columns with missing values
_MOST_MISSING = 0.5  # largest share of missing values of such a column
_NUMBER_WEIGHT = 0.5  # standard deviation; 1 for the values of slots
_CALIBRATION_ROWS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRows:
    """R rows and their click probabilities.

    Attributes:
        clicks: bool[R].
        probabilities: float64[R], of a click.
        numbers: float64[R, num_dense], whole numbers; nan is missing.
        values: int64[R, S], 32 bits each; -1 is missing.
    """

    clicks: NDArray[np.bool_]
    probabilities: NDArray[np.float64]
    numbers: NDArray[np.float64]
    values: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Distribution and weights of a slot's values."""

    cumulative: NDArray[np.float64]  # [V], cumulative probabilities
    values: NDArray[np.int64]  # [V]
    weights: NDArray[np.float64]  # [V]

    @classmethod
    def draw(cls, rng: np.random.Generator, vocabulary: int, zipf_exponent: float) -> Self:
        """Returns a random slot of `vocabulary` values and the missing one."""
        missing = _draw_missing_rate(rng)
        probabilities = np.arange(1, vocabulary + 1) ** -zipf_exponent
        cumulative = np.cumsum(probabilities) * (1 - missing) / probabilities.sum()
        values = rng.integers(0, 2**32, vocabulary)
        return cls(
            np.append(cumulative, 1.0), np.append(values, -1), rng.normal(size=vocabulary + 1)
        )


class PlantedModel:
    """The true model for one seed. Immutable.

    Attributes:
        schema: The columns of its rows.
    """

    def __init__(
        self, seed: int, *, num_slots: int = NUM_SLOTS, zipf_exponent: float = ZIPF_EXPONENT
    ) -> None:
        """Draws the weights, and computes bias and gain.

        Args:
            seed: At least 0.
            num_slots: S, at least 1; slots are named C1, C2, ...
            zipf_exponent: Value k of a slot, from 1, has a probability proportional to k ** -zipf_exponent.
        """
        rng = np.random.default_rng([seed, 0])
        slots = tuple(f"C{slot}" for slot in range(1, num_slots + 1))
        self.schema = replace(criteo_schema(), slots=slots)
        num_dense = len(self.schema.dense)
        vocabularies = np.geomspace(
            _SMALLEST_VOCABULARY, _LARGEST_VOCABULARY, len(self.schema.slots)
        )
        self._slots = [
            _Slot.draw(rng, round(vocabulary), zipf_exponent) for vocabulary in vocabularies
        ]
        self._missing_rates = np.array([_draw_missing_rate(rng) for _ in range(num_dense)])
        self._number_weights = rng.normal(0.0, _NUMBER_WEIGHT, num_dense)
        _, _, scores = self._draw_features(rng, _CALIBRATION_ROWS)
        self._gain = LOGIT_DEVIATION / scores.std()
        self._bias = _bias_for(self._gain * scores, CLICK_RATE)

    def draw(self, rng: np.random.Generator, num_rows: int) -> PlantedRows:
        """Returns `num_rows` new rows."""
        numbers, values, scores = self._draw_features(rng, num_rows)
        probabilities = _sigmoid(self._bias + self._gain * scores)
        return PlantedRows(
            clicks=rng.random(num_rows) < probabilities,
            probabilities=probabilities,
            numbers=numbers,
            values=values,
        )

    def _draw_features(
        self, rng: np.random.Generator, num_rows: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Returns numbers, values and scores."""
        numbers = self._draw_numbers(rng, num_rows)
        scores = self.schema.scale_dense(numbers) @ self._number_weights
        values = np.empty((num_rows, len(self._slots)), np.int64)
        for index, slot in enumerate(self._slots):
            drawn = np.searchsorted(slot.cumulative, rng.random(num_rows))
            values[:, index] = slot.values[drawn]
            scores += slot.weights[drawn]
        return numbers, values, scores

    def _draw_numbers(self, rng: np.random.Generator, num_rows: int) -> NDArray[np.float64]:
        """Returns counts that the schema transforms to about the standard normal distribution."""
        shift = np.array([column.shift for column in self.schema.dense])
        scale = np.array([column.scale for column in self.schema.dense])
        logarithms = rng.normal(shift, scale, (num_rows, len(shift)))
        numbers = np.maximum(np.rint(np.expm1(logarithms)), 0.0)
        numbers[rng.random(numbers.shape) < self._missing_rates] = np.nan
        return numbers


def _draw_missing_rate(rng: np.random.Generator) -> float:
    rate = rng.uniform(0.0, _MOST_MISSING)
    return rate if rng.random() < _MISSING_COLUMNS else 0.0


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))


def _bias_for(logits: NDArray[np.float64], click_rate: float) -> float:
    """Returns the bias for a mean probability of `click_rate`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if _sigmoid(logits + middle).mean() < click_rate:
            low = middle
        else:
            high = middle
    return middle
