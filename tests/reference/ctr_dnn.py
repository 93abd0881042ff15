"""CTR-DNN in float64, one example at a time; shares no code with ctr_model."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tests.reference.mlp import mlp

Array = NDArray[np.float64]


def probability(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    x = list(dense)
    for rows in slots["embedding"]:
        x.extend(rows.sum(axis=0))
    logits = mlp(np.array(x), tensors)
    exponentials = np.exp(logits - logits.max())
    return float(exponentials[1] / exponentials.sum())
