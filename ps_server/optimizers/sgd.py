"""Stochastic gradient descent, with and without momentum, and the plain sum of GEO training.

    w -= learning_rate * g                      sgd; no state

Robbins, Monro, "A stochastic approximation method", 1951.

    v = momentum * v + g
    w -= learning_rate * v                      momentum, nesterov = 0
    w -= learning_rate * (g + momentum * v)     momentum, nesterov = 1

Polyak, "Some methods of speeding up the convergence of iteration methods", 1964; both forms in Sutskever,
Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning", ICML 2013. Their
velocity is -learning_rate * v. With nesterov, w is their look-ahead point, where they take the gradient.
State: v[D]; it changes only when the row is updated.

    w += g                                      sum; no state

A delta of GEO training is pushed with one example, since servers apply means. The step is that of each
worker's own optimizer.
"""

from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, faded, row_function


class Sgd(NamedTuple):
    """Hyper-parameters; the rate depends on the scale of the model, so it has no default."""

    learning_rate: float


@row_function(Sgd)
def _update_sgd(
    hyper: Sgd, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    step = hyper.learning_rate * scale
    for j in range(weights.size):
        weights[j] -= step * grad[j]


SGD = Optimizer(name="sgd", hyper=Sgd, ranges={"learning_rate": (0.0, 1e6)}, num_slots=0)


class Momentum(NamedTuple):
    """Hyper-parameters; the rate depends on the scale of the model, so it has no default."""

    learning_rate: float
    momentum: float = 0.9
    nesterov: float = 0.0


@row_function(Momentum)
def _update_momentum(
    hyper: Momentum, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    looks_ahead = hyper.nesterov != np.float32(0.0)
    for j in range(weights.size):
        g = grad[j] * scale
        velocity = faded(hyper.momentum * state[j] + g)
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


class Sum(NamedTuple):
    """No hyper-parameters; the type selects the row function."""


@row_function(Sum)
def _update_sum(
    hyper: Sum, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    for j in range(weights.size):
        weights[j] += grad[j] * scale


SUM = Optimizer(name="sum", hyper=Sum, ranges={}, scheduled="", decays=False, num_slots=0)
