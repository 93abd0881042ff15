"""Adagrad with one accumulator for a row: a tenth of the state at dim 10.

    w -= learning_rate * g * sqrt(g0 / (g0 + n))
    n += mean_j(g_j^2)

PaddlePaddle's sparse "adagrad" rule, which scales by the accumulator before this gradient.
State: n.
"""

import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class AdagradRow(NamedTuple):
    """Hyper-parameters; `initial_g2sum` is g0."""

    learning_rate: float = 0.05
    initial_g2sum: float = 3.0


@row_function(AdagradRow)
def update(
    hyper: AdagradRow, weights: Values, state: Values, grad: Values, scale: np.float32
) -> None:
    """Updates one row."""
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
