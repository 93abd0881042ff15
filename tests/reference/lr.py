"""Logistic regression in float64, one example at a time; shares no code with ctr_model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference import fm

Array = NDArray[np.float64]


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    features = np.concatenate(slots["linear"])
    logit = fm.first_order(dense, tensors["linear.weight"], tensors["linear.bias"], features)
    return 1.0 / (1.0 + math.exp(-logit))
