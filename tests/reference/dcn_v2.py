"""DCN-v2 in float64, one example at a time; shares no code with ctr_model.

The names of the tensors determine structure and rank.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.cross import cross
from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    x0 = list(dense)
    for rows in slots["embedding"]:
        x0.extend(rows.sum(axis=0))
    weights, biases, layer = [], [], 1
    while f"cross{layer}.bias" in tensors:
        biases.append(tensors[f"cross{layer}.bias"])
        weights.append(_weight(tensors, f"cross{layer}"))
        layer += 1
    crossed = cross(np.array(x0), weights, biases)
    if "head.weight" in tensors:
        (deep,) = mlp(np.array(x0), tensors)
        logit = deep + np.dot(crossed, tensors["head.weight"])
    else:
        (logit,) = mlp(crossed, tensors)
    return 1.0 / (1.0 + math.exp(-logit))


def _weight(tensors: Mapping[str, Array], layer: str) -> Array:
    if f"{layer}.weight" in tensors:
        return tensors[f"{layer}.weight"]
    return tensors[f"{layer}.weight_in"] @ tensors[f"{layer}.weight_out"]
