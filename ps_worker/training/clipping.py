"""Clipping of a batch's gradient by its norm, `train.clip_norm`.

    norm = |g|,  g: mean over the examples of the batch, of all rows and all dense parameters together
    g *= clip_norm / norm                     where norm > clip_norm

Each batch is clipped by itself, before it is merged with others or leaves the worker: so it is the same in
every mode, and with several threads or workers. Pascanu, Mikolov, Bengio, "On the difficulty of training
recurrent neural networks", ICML 2013.
"""

import math

import numpy as np

from protos.gradients import Gradients, Values
from protos.runtime.jit import kernel


@kernel
def _sum_of_squares(values: Values) -> float:
    """Returns the sum in float64, of float32[n]; the order is fixed, so it is the same on every machine."""
    # Four sums, each of which waits for its own last addition alone: 3 times as fast as one.
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
    """Scales the gradients of a batch in place, if the norm of their mean is above `clip_norm`.

    Args:
        gradients: Sums over the same examples; finite, and writeable.
        clip_norm: The largest norm; above 0.
    """
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
