"""Stochastic gradient descent with momentum.

    v = momentum * v + g
    w -= learning_rate * v                      nesterov = 0
    w -= learning_rate * (g + momentum * v)     nesterov = 1

Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; both forms in Sutskever,
Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning", ICML 2013. Their
velocity is -learning_rate * v. With nesterov, w is their look-ahead point, where they take the gradient.
State: v[D]; it changes only when the row is updated.
"""

from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Momentum(NamedTuple):
    """Hyper-parameters; the rate depends on the scale of the model, so it has no default."""

    learning_rate: float
    momentum: float = 0.9
    nesterov: float = 0.0


@row_function(Momentum)
def update(
    hyper: Momentum, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    """Updates one row."""
    looks_ahead = hyper.nesterov != np.float32(0.0)
    for j in range(weights.size):
        g = grad[j] * scale
        velocity = hyper.momentum * state[j] + g
        state[j] = velocity
        step = g + hyper.momentum * velocity if looks_ahead else velocity
        weights[j] -= hyper.learning_rate * step


MOMENTUM = Optimizer(
    name="momentum",
    hyper=Momentum,
    ranges={"learning_rate": (0.0, 1e6), "momentum": (0.0, 0.9999), "nesterov": (0.0, 1.0)},
    switches=frozenset({"nesterov"}),
    num_slots=1,
)
