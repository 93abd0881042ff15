"""The cross network in float64, one example and one element at a time; shares no code with ctr_model."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cross(x0: Array, weights: Sequence[Array], biases: Sequence[Array]) -> Array:
    x = x0
    for weight, bias in zip(weights, biases, strict=True):
        x = np.array(
            [
                x0[j] * (sum(x[i] * weight[i, j] for i in range(len(x))) + bias[j]) + x[j]
                for j in range(len(x))
            ]
        )
    return x
