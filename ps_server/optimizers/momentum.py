"""Stochastic gradient descent with momentum: past gradients go on pushing.

    v = momentum * v + g
    w -= learning_rate * v

Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; in this form Sutskever,
Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning", ICML 2013.
State: v[D]. Of a row, only the updates that touched it count.
"""

from typing import NamedTuple

import numpy as np

from protos.gradients import Values
from ps_server.optimizers.row_update import Optimizer, row_function


class Momentum(NamedTuple):
    """Hyper-parameters; the rate depends on the scale of the model, so it has no default."""

    learning_rate: float
    momentum: float = 0.9


@row_function(Momentum)
def update(
    hyper: Momentum, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    """Updates one row."""
    for j in range(weights.size):
        velocity = hyper.momentum * state[j] + grad[j] * scale
        state[j] = velocity
        weights[j] -= hyper.learning_rate * velocity


MOMENTUM = Optimizer(
    name="momentum",
    hyper=Momentum,
    ranges={"learning_rate": (0.0, 1e6), "momentum": (0.0, 0.9999)},
    num_slots=1,
)
