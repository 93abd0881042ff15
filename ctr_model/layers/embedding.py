"""Embedding with sum pooling: numbers, then for each slot the sum of its keys' embeddings.

    X[b, j] = dense[b, j]
    X[b, num_dense + s * D + d] = sum of rows[inverse[i], d] over i from offsets[b * S + s]
                                  to offsets[b * S + s + 1], exclusive

A slot without keys is zeros. Indices are unsigned in the kernels, because for signed ones numba checks for
negative indices, which makes both kernels half as fast.
"""

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.lookup import Ints, Lookup
from ctr_ps.ctr_model.parameters import Floats


def pool_slots(dense: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[B, num_dense + S * D] with X, for `dense` float32[B, num_dense]."""
    first_column = dense.shape[1]
    out[:, :first_column] = dense
    _pool(lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, first_column, out)


def scatter_slots(grad: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[N, D], the gradient of the rows; `grad` is that of `pool_slots`' output."""
    first_column = grad.shape[1] - lookup.num_slots * out.shape[1]
    _scatter(grad, lookup.inverse, lookup.offsets, lookup.num_slots, first_column, out)


@kernel
def _pool(
    rows: Floats, inverse: Ints, offsets: Ints, num_slots: int, first_column: int, out: Floats
) -> None:
    """Overwrites the columns of `out` from `first_column` on with pooled embeddings."""
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
def _scatter(
    grad: Floats, inverse: Ints, offsets: Ints, num_slots: int, first_column: int, out: Floats
) -> None:
    """Overwrites `out` with the gradient of the rows; `grad` has pooled embeddings from `first_column` on."""
    dim = np.uintp(out.shape[1])
    out[:] = np.float32(0.0)
    for b in range(grad.shape[0]):
        for s in range(num_slots):
            column = np.uintp(first_column) + np.uintp(s) * dim
            for i in range(offsets[b * num_slots + s], offsets[b * num_slots + s + 1]):
                row = np.uintp(inverse[i])
                for d in range(dim):
                    out[row, d] += grad[b, column + d]
