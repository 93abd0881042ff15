"""A multilayer perceptron in float64, one example at a time; shares no code with ctr_model."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mlp(x: Array, tensors: Mapping[str, Array], name: str = "fc") -> Array:
    """The layers `name1`, `name2`, ..., with relu between them."""
    last = 1
    while f"{name}{last + 1}.weight" in tensors:
        last += 1
    for i in range(1, last + 1):
        x = x @ tensors[f"{name}{i}.weight"] + tensors[f"{name}{i}.bias"]
        if i < last:
            x = np.where(x > 0, x, 0.0)
    return x
