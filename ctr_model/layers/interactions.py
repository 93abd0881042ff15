"""The second-order part of a factorization machine: interactions of the features of an example.

    z[b] = sum over pairs i < j of example b's keys of <v_i, v_j>
         = sum over j of <v_j, v_1 + ... + v_(j-1)>
    dz[b] / dv_i = (v_1 + ... + v_n) - v_i

Each occurrence of a key is a feature of value 1. The second line takes one pass over the n features instead
of their pairs, like Rendle's 1/2 (|sum of v|^2 - sum of |v|^2), but without cancellation of large numbers.
"""

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.lookup import Ints, Lookup
from ctr_ps.ctr_model.parameters import Floats


def add_interactions(lookup: Lookup, sums: Floats, out: Floats) -> None:
    """Adds z to `out` float32[B]; overwrites `sums` float32[B, D], the sums of v, for the backward pass."""
    _add_interactions(lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, sums, out)


def interactions_backward(grad: Floats, sums: Floats, lookup: Lookup, out: Floats) -> None:
    """Adds the gradient of the rows to `out` float32[N, D]; `sums` is that of `add_interactions`."""
    _interactions_backward(
        grad, sums, lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, out
    )


@kernel
def _add_interactions(
    rows: Floats, inverse: Ints, offsets: Ints, num_slots: int, sums: Floats, out: Floats
) -> None:
    dim = np.uintp(rows.shape[1])
    for b in range(out.size):
        z = np.float32(0.0)
        sums[b] = np.float32(0.0)
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            row = np.uintp(inverse[i])
            for d in range(dim):
                z += rows[row, d] * sums[b, d]
                sums[b, d] += rows[row, d]
        out[b] += z


@kernel
def _interactions_backward(
    grad: Floats,
    sums: Floats,
    rows: Floats,
    inverse: Ints,
    offsets: Ints,
    num_slots: int,
    out: Floats,
) -> None:
    dim = np.uintp(rows.shape[1])
    for b in range(grad.size):
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            row = np.uintp(inverse[i])
            for d in range(dim):
                out[row, d] += grad[b] * (sums[b, d] - rows[row, d])
