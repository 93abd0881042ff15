"""DIN in float64, one example at a time; shares no code with ctr_model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probability(
    dense: Array,
    slots: Mapping[str, Sequence[Array]],
    tensors: Mapping[str, Array],
    *,
    histories: Mapping[int, int],
    max_length: int,
) -> float:
    """`histories` has the target of each history."""
    pooled = [rows.sum(axis=0) for rows in slots["embedding"]]
    for history, target in histories.items():
        t = pooled[target]
        interest = np.zeros_like(t)
        for h in slots["embedding"][history][-max_length:]:
            x = np.concatenate([h, t, h - t, h * t])
            (weight,) = mlp(x, tensors, f"attention.C{history + 1}.")
            interest += (1.0 + weight) * h
        pooled[history] = interest
    (logit,) = mlp(np.concatenate([dense, *pooled]), tensors)
    return 1.0 / (1.0 + math.exp(-logit))
