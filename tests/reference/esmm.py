"""ESMM in float64, one example at a time; shares no code with ctr_model."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probabilities(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> list[float]:
    """Returns pCTR, pCVR and pCTCVR."""
    x = list(dense)
    for rows in slots["embedding"]:
        x.extend(rows.sum(axis=0))
    (of_click,) = mlp(np.array(x), tensors, "ctr")
    (of_conversion,) = mlp(np.array(x), tensors, "cvr")
    ctr, cvr = 1.0 / (1.0 + math.exp(-of_click)), 1.0 / (1.0 + math.exp(-of_conversion))
    return [ctr, cvr, ctr * cvr]


def loss(found: Sequence[float], labels: Sequence[float]) -> float:
    ctr, _, ctcvr = found
    click, both = labels[0], labels[0] * labels[1]
    return -math.log(ctr if click else 1.0 - ctr) - math.log(ctcvr if both else 1.0 - ctcvr)
