"""Stochastic gradient descent.

    w -= learning_rate * g

Robbins, Monro, "A stochastic approximation method", 1951.
"""

from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Sgd(NamedTuple):
    """Hyper-parameters; the rate depends on the scale of the model, so it has no default."""

    learning_rate: float


@row_function(Sgd)
def update(hyper: Sgd, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row; it has no state."""
    step = hyper.learning_rate * scale
    for j in range(weights.size):
        weights[j] -= step * grad[j]


SGD = Optimizer(name="sgd", hyper=Sgd, ranges={"learning_rate": (0.0, 1e6)}, num_slots=0)
