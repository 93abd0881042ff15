"""Embedding with sum pooling: each slot of an example is the sum of its keys' embeddings.

    X[b, first + s * D + d] = sum of rows[inverse[i], d] over i from offsets[b * S + s]
                              to offsets[b * S + s + 1], exclusive

A slot without keys is zeros. Row and column numbers are unsigned in the kernels: for signed ones numba
tests whether an index counts from the end, which makes both kernels half as fast.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_model.jit import kernel

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@kernel
def pool_slots(
    rows: Floats, inverse: Ints, offsets: Ints, num_slots: int, first_column: int, out: Floats
) -> None:
    """Writes pooled embeddings into the columns of `out` from `first_column` on.

    Args:
        rows: float32[N, D].
        inverse: int32[L].
        offsets: int32[B * S + 1].
        num_slots: S.
        first_column: Where the embeddings begin.
        out: float32[B, first_column + S * D], written in place.
    """
    dim = np.uintp(rows.shape[1])
    out[:, first_column:] = np.float32(0.0)
    for b in range(out.shape[0]):
        for s in range(num_slots):
            column = np.uintp(first_column) + np.uintp(s) * dim
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                row = np.uintp(inverse[i])
                for d in range(dim):
                    out[b, column + d] += rows[row, d]


@kernel
def scatter_slots(
    grad: Floats, inverse: Ints, offsets: Ints, num_slots: int, first_column: int, out: Floats
) -> None:
    """Sums the gradient of `pool_slots`' output over the occurrences of each unique key.

    Args:
        grad: float32[B, first_column + S * D].
        inverse: int32[L].
        offsets: int32[B * S + 1].
        num_slots: S.
        first_column: Where the embeddings begin.
        out: float32[N, D], overwritten.
    """
    dim = np.uintp(out.shape[1])
    out[:] = np.float32(0.0)
    for b in range(grad.shape[0]):
        for s in range(num_slots):
            column = np.uintp(first_column) + np.uintp(s) * dim
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                row = np.uintp(inverse[i])
                for d in range(dim):
                    out[row, d] += grad[b, column + d]
