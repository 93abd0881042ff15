"""The first-order part of a logit: a bias, and a weight for each number and each key.

    z[b] = bias + sum over j of weight[j] * dense[b, j] + sum over the keys of example b of their weights

The weights of keys are the rows of a table of dim 1. A key that occurs twice in an example counts twice.
"""

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.lookup import Ints, Lookup
from ctr_ps.ctr_model.parameters import Floats, Segment


def first_order_segments(num_dense: int, *, name: str = "linear") -> tuple[Segment, Segment]:
    """Returns the dense parameters, initially zeros: `weight` of the numbers, and `bias`."""
    return (
        Segment(name=f"{name}.weight", shape=(num_dense,), init_std=0.0),
        Segment(name=f"{name}.bias", shape=(1,), init_std=0.0),
    )


def first_order(dense: Floats, lookup: Lookup, weight: Floats, bias: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B] with z; `lookup` is of a table of dim 1."""
    _first_order(
        dense, lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, weight, bias, out
    )


def first_order_backward(
    grad: Floats,
    dense: Floats,
    lookup: Lookup,
    rows_grad: Floats,
    weight_grad: Floats,
    bias_grad: Floats,
) -> None:
    """Overwrites the gradients of rows float32[N, 1], weight and bias, given `grad` float32[B], of z."""
    _first_order_backward(
        grad,
        dense,
        lookup.inverse,
        lookup.offsets,
        lookup.num_slots,
        rows_grad,
        weight_grad,
        bias_grad,
    )


@kernel
def _first_order(
    dense: Floats,
    rows: Floats,
    inverse: Ints,
    offsets: Ints,
    num_slots: int,
    weight: Floats,
    bias: Floats,
    out: Floats,
) -> None:
    for b in range(out.size):
        z = bias[0]
        for j in range(weight.size):
            z += weight[j] * dense[b, j]
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            z += rows[np.uintp(inverse[i]), 0]
        out[b] = z


@kernel
def _first_order_backward(
    grad: Floats,
    dense: Floats,
    inverse: Ints,
    offsets: Ints,
    num_slots: int,
    rows_grad: Floats,
    weight_grad: Floats,
    bias_grad: Floats,
) -> None:
    rows_grad[:] = np.float32(0.0)
    weight_grad[:] = np.float32(0.0)
    bias_grad[0] = np.float32(0.0)
    for b in range(grad.size):
        bias_grad[0] += grad[b]
        for j in range(weight_grad.size):
            weight_grad[j] += grad[b] * dense[b, j]
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            rows_grad[np.uintp(inverse[i]), 0] += grad[b]
