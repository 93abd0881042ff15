"""The factorization machine in float64: sums over an example's features and over all pairs of them.

Shares no code with ctr_model.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def first_order(dense: Array, weight: Array, bias: Array, features: Array) -> float:
    """Returns bias + weighted numbers + the weights float64[K, 1] of K features."""
    return float(bias[0] + np.dot(dense, weight) + sum(w for (w,) in features))


def interactions(features: Array) -> float:
    """Returns the sum over pairs of the features float64[K, D] of their products."""
    return float(sum(np.dot(first, second) for first, second in combinations(features, 2)))


def logit(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    weights, embeddings = np.concatenate(slots["linear"]), np.concatenate(slots["embedding"])
    linear = first_order(dense, tensors["linear.weight"], tensors["linear.bias"], weights)
    return linear + interactions(embeddings)


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    return 1.0 / (1.0 + math.exp(-logit(dense, slots, tensors)))
