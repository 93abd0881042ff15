"""The second-order part of a factorization machine: how the features of an example go together.

    z[b] = sum over pairs i < j of example b's keys of <v_i, v_j>
         = sum over j of <v_j, v_1 + ... + v_(j-1)>
    dz[b] / dv_i = (v_1 + ... + v_n) - v_i

Each occurrence of a key is a feature of value 1. The second line takes one pass over the n features
instead of one over their pairs, as does Rendle's 1/2 (|sum of v|^2 - sum of |v|^2); unlike that, it
subtracts no large numbers from each other.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_model.jit import kernel

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@kernel
def add_interactions(
    rows: Floats, inverse: Ints, offsets: Ints, num_slots: int, sums: Floats, out: Floats
) -> None:
    """Adds the z of the module's docstring to `out`.

    Args:
        rows: float32[N, D].
        inverse: int32[L].
        offsets: int32[B * S + 1].
        num_slots: S.
        sums: float32[B, D], overwritten with the sum of an example's embeddings, for the way back.
        out: float32[B], added to.
    """
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
def interactions_backward(
    grad: Floats,
    sums: Floats,
    rows: Floats,
    inverse: Ints,
    offsets: Ints,
    num_slots: int,
    out: Floats,
) -> None:
    """Adds the gradient of the rows to `out`.

    Args:
        grad: float32[B], of z.
        sums: float32[B, D], as `add_interactions` left it.
        rows: float32[N, D].
        inverse: int32[L].
        offsets: int32[B * S + 1].
        num_slots: S.
        out: float32[N, D], added to.
    """
    dim = np.uintp(rows.shape[1])
    for b in range(grad.size):
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            row = np.uintp(inverse[i])
            for d in range(dim):
                out[row, d] += grad[b] * (sums[b, d] - rows[row, d])
