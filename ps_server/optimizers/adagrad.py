"""Adagrad, with an accumulator for each weight or for each row.

Adagrad:

    n += (1 + 2 * s) * g^2
    w -= learning_rate * g / (sqrt(n) + epsilon)

Duchi, Hazan, Singer, "Adaptive subgradient methods", JMLR 12, 2011. State: n[D].

s is the gradient's staleness: the steps applied since its pull, which are likely to go the same way. McMahan,
Streeter, "Delay-tolerant algorithms for asynchronous distributed online learning", NIPS 2014, add
g^2 + 2 * g * (sum of their gradients); here they are as large as g, so a row keeps no sum.

Of a row, a tenth of the state at dim 10:

    w -= learning_rate * g * sqrt(g0 / (g0 + n))
    n += mean_j(g_j^2)

PaddlePaddle's sparse "adagrad" rule, which scales by the accumulator before this gradient. State: n.
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
def _update_adagrad(
    hyper: Adagrad, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
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


class AdagradRow(NamedTuple):
    """Hyper-parameters; `initial_g2sum` is g0."""

    learning_rate: float = 0.05
    initial_g2sum: float = 3.0


@row_function(AdagradRow)
def _update_adagrad_row(
    hyper: AdagradRow, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    g0 = hyper.initial_g2sum
    rate = hyper.learning_rate * math.sqrt(g0 / (g0 + state[0]))
    squares = np.float32(0.0)
    for j in range(weights.size):
        g = grad[j] * scale
        weights[j] -= rate * g
        squares += g * g
    state[0] += squares / np.float32(weights.size)


ADAGRAD_ROW = Optimizer(
    name="adagrad_row",
    hyper=AdagradRow,
    ranges={"learning_rate": (0.0, 1e6), "initial_g2sum": (1e-30, 1e6)},
    num_slots=0,
    initial_scalars=(0.0,),
    is_elementwise=False,
)
