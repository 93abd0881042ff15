"""FTRL-Proximal: an adaptive rate for each weight, and an L1 penalty that makes exact zeros.

    s = (sqrt(n + g^2) - sqrt(n)) / learning_rate
    z += g - s * w,   n += g^2
    w = 0                                                        where |z| <= l1
    w = -(z - sign(z) * l1) / ((beta + sqrt(n)) / learning_rate + l2)   elsewhere

McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1.
State: learning_rate * z [D], n[D]; so a job that resumes with another rate starts with the same weights.

In the paper w and z start at 0. Here a weight that starts elsewhere starts with
z = -w * beta / learning_rate: the first proximal term is centred at the initial weight (McMahan,
"Follow-the-regularized-leader and mirror descent", AISTATS 2011). Without penalties the formula returns that
weight, and each step is one of gradient descent with the rate learning_rate / (beta + sqrt(n)). Penalties
pull initial weights to zero too: with l1 a key that was hardly seen gets zeros, whatever its initial weights.

A schedule of the learning rate weights the gradients that z adds up, by its factor f:

    z += f * g - s * w

So without penalties a step has the rate f * learning_rate / (beta + sqrt(n)), and the weight of l1 and l2
against all gradients so far does not change with f: penalties that go to 0 would let go of their zeros.
"""

import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Ftrl(NamedTuple):
    """Hyper-parameters; `learning_rate` is the paper's alpha, `gradient_weight` the schedule's f."""

    learning_rate: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    gradient_weight: float = 1.0


@row_function(Ftrl)
def update(hyper: Ftrl, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row."""
    zero = np.float32(0.0)
    dim = weights.size
    for j in range(dim):
        g = grad[j] * scale
        rate_z, n = state[j], state[dim + j]
        if rate_z == zero and n == zero:
            rate_z = -weights[j] * hyper.beta
        new_n = n + g * g
        # The roots are nearly equal: their difference in float32 would be noise.
        s = math.sqrt(np.float64(new_n)) - math.sqrt(np.float64(n))
        rate_z += hyper.gradient_weight * hyper.learning_rate * g - np.float32(s) * weights[j]
        state[j] = rate_z
        state[dim + j] = new_n
        excess = abs(rate_z) - hyper.learning_rate * hyper.l1
        if excess <= zero:
            weights[j] = zero
        else:
            curvature = hyper.beta + math.sqrt(new_n) + hyper.learning_rate * hyper.l2
            weights[j] = -math.copysign(excess, rate_z) / curvature


FTRL = Optimizer(
    name="ftrl",
    hyper=Ftrl,
    ranges={
        "learning_rate": (1e-6, 1e6),
        "beta": (1e-6, 1e6),
        "l1": (0.0, 1e6),
        "l2": (0.0, 1e6),
    },
    scheduled="gradient_weight",
    decays=False,
    num_slots=2,
    is_movable=False,
)
