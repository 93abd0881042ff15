"""MMoE in float64, one example at a time; shares no code with ctr_model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probabilities(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> list[float]:
    pooled = [rows.sum(axis=0) for rows in slots["embedding"]]
    x = np.concatenate([dense, *pooled])
    experts = []
    while f"expert{len(experts) + 1}.1.weight" in tensors:
        out = mlp(x, tensors, f"expert{len(experts) + 1}.")
        experts.append(np.maximum(np.array(out), 0.0))
    found: list[float] = []
    while f"gate{len(found) + 1}.weight" in tensors:
        task = len(found) + 1
        powers = np.exp(x @ tensors[f"gate{task}.weight"])
        shares = powers / powers.sum()
        mixed = sum(share * expert for share, expert in zip(shares, experts, strict=True))
        (logit,) = mlp(np.array(mixed), tensors, f"tower{task}.")
        found.append(1.0 / (1.0 + math.exp(-logit)))
    return found


def loss(found: Sequence[float], labels: Sequence[float]) -> float:
    return -sum(math.log(p if y else 1.0 - p) for p, y in zip(found, labels, strict=True))
