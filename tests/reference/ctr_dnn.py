"""CTR-DNN's loss in float64, by loops over examples, slots and keys; shares no code with ctr_model."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def network_input(
    dense: Array, rows: Array, inverse: Sequence[int], offsets: Sequence[int], num_slots: int
) -> Array:
    """Returns [dense | sum of each slot's embeddings], one row an example."""
    examples = []
    for b in range(len(dense)):
        parts = list(dense[b])
        for s in range(num_slots):
            total = np.zeros(rows.shape[1])
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                total = total + rows[inverse[i]]
            parts.extend(total)
        examples.append(parts)
    return np.array(examples)


def probability(x: Array, tensors: Sequence[Array]) -> float:
    """Returns the probability of a click for one example's input."""
    layers = list(zip(tensors[::2], tensors[1::2], strict=True))
    for i, (weight, bias) in enumerate(layers):
        x = x @ weight + bias
        if i < len(layers) - 1:
            x = np.where(x > 0, x, 0.0)
    exponentials = np.exp(x - x.max())
    return float(exponentials[1] / exponentials.sum())


def loss(labels: Array, inputs: Array, tensors: Sequence[Array]) -> float:
    """Returns the cross entropy summed over the examples."""
    total = 0.0
    for label, x in zip(labels, inputs, strict=True):
        p = probability(x, tensors)
        total -= math.log(p) if label == 1 else math.log(1.0 - p)
    return total
