"""The model of examples/my_model.py in float64, one example at a time; shares no code with it."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    logit = float(tensors["bias"][0])
    for rows in slots["weight"]:
        logit += sum(row[0] for row in rows)
    for rows in slots["embedding"]:
        for row in rows:
            for d, weight in enumerate(row):
                logit += weight * sum(
                    x * g for x, g in zip(dense, tensors["gate"][:, d], strict=True)
                )
    return 1.0 / (1.0 + math.exp(-logit))
