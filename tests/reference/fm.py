"""The factorization machine in float64: sums over an example's features and over all pairs of them.

Features are keys as they stand in the example, one after the other; shares no code with ctr_model.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def first_order(
    dense: Array, weight: Array, bias: Array, rows: Array, features: Sequence[int]
) -> float:
    """Returns one example's bias + weighted numbers + weights of its features."""
    return float(bias[0] + np.dot(dense, weight) + sum(rows[key, 0] for key in features))


def interactions(rows: Array, features: Sequence[int]) -> float:
    """Returns the sum over pairs of one example's features of their embeddings' products."""
    return float(sum(np.dot(rows[a], rows[b]) for a, b in combinations(features, 2)))
