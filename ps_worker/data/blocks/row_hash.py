"""Row hashes: a pseudorandom number per row, a function of the seed and the row's number only."""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import GAMMA, mix64
from ctr_ps.ctr_model.jit import kernel


@kernel
def row_hash(seed: int, row: int) -> np.uint64:
    """Returns a uniform uint64, distinct for each row of a seed."""
    return mix64(mix64(np.uint64(seed) + GAMMA) ^ np.uint64(row))


@kernel
def write_row_hashes(seed: int, first_row: int, hashes: NDArray[np.uint64]) -> None:
    """Overwrites `hashes` uint64[N] with the hashes of the rows from `first_row` on."""
    for i in range(len(hashes)):
        hashes[i] = row_hash(seed, first_row + i)
