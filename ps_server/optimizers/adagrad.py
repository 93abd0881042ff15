"""Adagrad with one accumulator for each weight.

    n += g^2
    w -= learning_rate * g / (sqrt(n) + epsilon)

Duchi, Hazan, Singer, "Adaptive subgradient methods", JMLR 12, 2011. State: n[D].
"""

import math
from typing import NamedTuple

import numpy as np

from protos.gradients import Values
from ps_server.optimizers.row_update import Optimizer, row_function


class Adagrad(NamedTuple):
    """Hyper-parameters; `initial_accumulator` is where n starts."""

    learning_rate: float = 0.05
    initial_accumulator: float = 0.0
    epsilon: float = 1e-10


@row_function(Adagrad)
def update(hyper: Adagrad, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row."""
    for j in range(weights.size):
        g = grad[j] * scale
        accumulator = state[j] + g * g
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
