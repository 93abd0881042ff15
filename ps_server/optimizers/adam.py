"""Adam, "lazy": a row's state changes only when the row is updated.

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w -= learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1; t counts the updates of
this row. State: m[D], v[D], beta1^t, beta2^t: powers cost a multiplication, not a `pow`.
"""

import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Adam(NamedTuple):
    """Hyper-parameters."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@row_function(Adam)
def update(hyper: Adam, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row."""
    one = np.float32(1.0)
    dim = weights.size
    beta1_power = state[2 * dim] * hyper.beta1
    beta2_power = state[2 * dim + 1] * hyper.beta2
    state[2 * dim] = beta1_power
    state[2 * dim + 1] = beta2_power
    rate = hyper.learning_rate / (one - beta1_power)
    correction = one / (one - beta2_power)
    for j in range(dim):
        g = grad[j] * scale
        m = hyper.beta1 * state[j] + (one - hyper.beta1) * g
        v = hyper.beta2 * state[dim + j] + (one - hyper.beta2) * g * g
        state[j] = m
        state[dim + j] = v
        weights[j] -= rate * m / (math.sqrt(v * correction) + hyper.epsilon)


ADAM = Optimizer(
    name="adam",
    hyper=Adam,
    ranges={
        "learning_rate": (0.0, 1e6),
        "beta1": (0.0, 0.9999),
        "beta2": (0.0, 0.99999),
        "epsilon": (1e-20, 1.0),
    },
    num_slots=2,
    initial_scalars=(1.0, 1.0),
)
