"""Adagrad with one accumulator for each weight.

    n += (1 + 2 * s) * g^2
    w -= learning_rate * g / (sqrt(n) + epsilon)

Duchi, Hazan, Singer, "Adaptive subgradient methods", JMLR 12, 2011. State: n[D].

s is the gradient's staleness: the steps applied since its pull, which are likely to go the same way. McMahan,
Streeter, "Delay-tolerant algorithms for asynchronous distributed online learning", NIPS 2014, add
g^2 + 2 * g * (sum of their gradients); here they are as large as g, so a row keeps no sum.
"""

import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Adagrad(NamedTuple):
    """Hyper-parameters; `initial_accumulator` is where n starts, `staleness` s."""

    learning_rate: float = 0.05
    initial_accumulator: float = 0.0
    epsilon: float = 1e-10
    staleness: float = 0.0


@row_function(Adagrad)
def update(hyper: Adagrad, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row."""
    weight = np.float32(1.0) + np.float32(2.0) * hyper.staleness
    for j in range(weights.size):
        g = grad[j] * scale
        accumulator = state[j] + weight * (g * g)
        state[j] = accumulator
        weights[j] -= hyper.learning_rate * g / (math.sqrt(accumulator) + hyper.epsilon)


ADAGRAD = Optimizer(
    name="adagrad",
    hyper=Adagrad,
    ranges={
        "learning_rate": (0.0, 1e6),
        "initial_accumulator": (0.0, 1e6),
        "epsilon": (1e-20, 1.0),
    },
    num_slots=1,
    initial_slot="initial_accumulator",
)
