"""Adam, "lazy": a row's state changes only when the row is updated; t counts the updates of this row.

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w -= learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)

Kingma, Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1.
State: m[D], v[D], beta1^t, beta2^t: powers cost a multiplication, not a `pow`.

With one second moment for a row, half the state:

    v = beta2 * v + (1 - beta2) * mean_j(g_j^2)

as in Zhang et al., "Adam-mini: use fewer learning rates to gain more", ICLR 2025, with a second moment for a
block of weights; an embedding is a block. First moments are of each weight, unlike in PaddlePaddle's
"shared_adam". State: m[D], v, beta1^t, beta2^t.
"""

import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, faded, normal, row_function

_RANGES = {
    "learning_rate": (0.0, 1e6),
    "beta1": (0.0, 0.9999),
    "beta2": (0.0, 0.99999),
    "epsilon": (1e-20, 1.0),
}


class Adam(NamedTuple):
    """Hyper-parameters."""

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@row_function(Adam)
def _update_adam(
    hyper: Adam, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    one = np.float32(1.0)
    dim = weights.size
    beta1_power = normal(state[2 * dim] * hyper.beta1)
    beta2_power = normal(state[2 * dim + 1] * hyper.beta2)
    state[2 * dim] = beta1_power
    state[2 * dim + 1] = beta2_power
    rate = hyper.learning_rate / (one - beta1_power)
    correction = one / (one - beta2_power)
    for j in range(dim):
        g = grad[j] * scale
        m = faded(hyper.beta1 * state[j] + (one - hyper.beta1) * g)
        v = normal(hyper.beta2 * state[dim + j] + (one - hyper.beta2) * g * g)
        state[j] = m
        state[dim + j] = v
        weights[j] -= rate * m / (math.sqrt(v * correction) + hyper.epsilon)


ADAM = Optimizer(
    name="adam",
    hyper=Adam,
    ranges=_RANGES,
    num_slots=2,
    initial_scalars=(1.0, 1.0),
)


class AdamRow(Adam):
    """Hyper-parameters; the type selects the row function."""


@row_function(AdamRow)
def _update_adam_row(
    hyper: AdamRow, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    one = np.float32(1.0)
    dim = weights.size
    squares = np.float32(0.0)
    for j in range(dim):
        g = grad[j] * scale
        state[j] = faded(hyper.beta1 * state[j] + (one - hyper.beta1) * g)
        squares += g * g
    v = normal(hyper.beta2 * state[dim] + (one - hyper.beta2) * squares / np.float32(dim))
    beta1_power = normal(state[dim + 1] * hyper.beta1)
    beta2_power = normal(state[dim + 2] * hyper.beta2)
    state[dim] = v
    state[dim + 1] = beta1_power
    state[dim + 2] = beta2_power
    rate = hyper.learning_rate / (one - beta1_power)
    step = rate / (math.sqrt(v / (one - beta2_power)) + hyper.epsilon)
    for j in range(dim):
        weights[j] -= step * state[j]


ADAM_ROW = Optimizer(
    name="adam_row",
    hyper=AdamRow,
    ranges=_RANGES,
    num_slots=1,
    initial_scalars=(0.0, 1.0, 1.0),
    is_elementwise=False,
)
