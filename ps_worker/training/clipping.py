"""Clipping of a batch's gradient by its norm, `train.clip_norm`.

    norm = |g|,  g: mean over the examples of the batch, of all rows and all dense parameters together
    g *= clip_norm / norm                     where norm > clip_norm

Each batch is clipped by itself, before it is merged or pushed: so the result is the same in every mode, and
with several threads or workers. Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural
networks", ICML 2013.
"""

import math

import numpy as np

from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.runtime.jit import kernel


@kernel
def _sum_of_squares(values: Values) -> float:
    """Returns the sum in float64, of float32[n]; its fixed order makes it equal on every machine."""
    # Four sums, each waiting only for its own last addition: 3 times as fast as one.
    a = b = c = d = 0.0
    whole = values.size // 4 * 4
    for i in range(0, whole, 4):
        a += np.float64(values[i]) * np.float64(values[i])
        b += np.float64(values[i + 1]) * np.float64(values[i + 1])
        c += np.float64(values[i + 2]) * np.float64(values[i + 2])
        d += np.float64(values[i + 3]) * np.float64(values[i + 3])
    for i in range(whole, values.size):
        a += np.float64(values[i]) * np.float64(values[i])
    return (a + b) + (c + d)


def clip(gradients: Gradients, clip_norm: float) -> None:
    """Scales a batch's gradients, sums over examples, in place if their mean's norm exceeds `clip_norm`."""
    examples = max(
        (grad.examples for each in (gradients.sparse, gradients.dense) for grad in each.values()),
        default=0,
    )
    if not examples:
        return  # all its examples have weight 0, and so have its gradients
    values = [grad.values for grad in gradients.sparse.values()]
    values += [grad.values for grad in gradients.dense.values()]
    norm = math.sqrt(sum(_sum_of_squares(each.reshape(-1)) for each in values)) / examples
    if norm > clip_norm:
        for each in values:
            np.multiply(each, np.float32(clip_norm / norm), out=each)
