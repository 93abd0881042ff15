"""FTRL-Proximal: an adaptive rate for each weight, and an L1 penalty that makes exact zeros.

    s = (sqrt(n + g^2) - sqrt(n)) / learning_rate
    z += g - s * w,   n += g^2
    w = 0                                                        where |z| <= l1
    w = -(z - sign(z) * l1) / ((beta + sqrt(n)) / learning_rate + l2)   elsewhere

McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1. State: z[D], n[D].

There weights are 0 before their first gradient. Here they may have other initial values: while n = 0, z is
what gives the weight by the formula above, so the first gradient moves it from where it is.
"""

import math
from typing import NamedTuple

import numpy as np

from protos.gradients import Values
from ps_server.optimizers.row_update import Optimizer, row_function


class Ftrl(NamedTuple):
    """Hyper-parameters; `learning_rate` is the paper's alpha."""

    learning_rate: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


@row_function(Ftrl)
def update(hyper: Ftrl, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row."""
    dim = weights.size
    for j in range(dim):
        g = grad[j] * scale
        w, n = weights[j], state[dim + j]
        root = math.sqrt(n)
        z = state[j]
        if n == np.float32(0.0):
            z = -w * (hyper.beta / hyper.learning_rate + hyper.l2)
            z -= math.copysign(hyper.l1, w) if w != np.float32(0.0) else np.float32(0.0)
        n += g * g
        new_root = math.sqrt(n)
        # (sqrt(n + g^2) - sqrt(n)) without the difference of two numbers that are nearly equal.
        total = new_root + root
        if total > np.float32(0.0):
            z += g - g * g / total / hyper.learning_rate * w
        else:
            z += g
        state[j] = z
        state[dim + j] = n
        excess = abs(z) - hyper.l1
        if excess <= np.float32(0.0):
            weights[j] = np.float32(0.0)
        else:
            curvature = (hyper.beta + new_root) / hyper.learning_rate + hyper.l2
            weights[j] = -math.copysign(excess, z) / curvature


FTRL = Optimizer(
    name="ftrl",
    hyper=Ftrl,
    ranges={
        "learning_rate": (1e-6, 1e6),
        "beta": (1e-6, 1e6),
        "l1": (0.0, 1e6),
        "l2": (0.0, 1e6),
    },
    num_slots=2,
)
