"""Sum: adds the deltas that workers push in GEO training.

    w += g

A delta is pushed with one example, since servers apply means. No state, no hyper-parameters: the step is that
of each worker's own optimizer.
"""

from typing import NamedTuple

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.optimizers.row_update import Optimizer, row_function


class Sum(NamedTuple):
    """No hyper-parameters; the type selects the row function."""


@row_function(Sum)
def update(hyper: Sum, weights: Values, state: Values, grad: Values, scale: np.float32) -> None:
    """Updates one row; it has no state."""
    for j in range(weights.size):
        weights[j] += grad[j] * scale


SUM = Optimizer(name="sum", hyper=Sum, ranges={}, scheduled="", decays=False, num_slots=0)
