"""DeepFM in float64, one example at a time; shares no code with ctr_model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference import fm
from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    """`slots["pooled"]`, if given, are those of the perceptron."""
    x = list(dense)
    for rows in slots.get("pooled", slots["embedding"]):
        x.extend(rows.sum(axis=0))
    (deep,) = mlp(np.array(x), tensors)
    return 1.0 / (1.0 + math.exp(-fm.logit(dense, slots, tensors) - deep))
