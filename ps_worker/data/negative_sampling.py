"""Negative down-sampling: training on a share of the rows without a click, chosen by a hash.

The hash is that of the seed, the file (`file_label`) and the row's place in it, so the choice does not depend
on threads, epochs and restarts. A model trained on the kept rows alone predicts the odds of a click times
1 / rate; the correction is one of

    weight   a kept negative has weight 1 / rate: the sums over all rows are kept in expectation
    logit    training adds -log(rate) to the logit: so the model's own logit is that of all rows
             (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook, ADKDD 2014, section 6.3,
             where the same shift is made when predicting)
"""

from dataclasses import dataclass, replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import GAMMA, key_of, mix64
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.blocks import Block, rows_where


@dataclass(frozen=True, slots=True)
class NegativeSampling:
    """The choice of rows without a click; a UsageError unless the rate is in (0, 1]."""

    rate: float  # probability of keeping one, in (0, 1]
    seed: int = 0  # seed of the hash
    is_weighted: bool = True  # whether a kept one gets weight 1 / `rate`

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise UsageError(
                f"the rate of negatives is {self.rate!r}, expected more than 0, up to 1"
            )

    def sampled(self, path: str, block: Block) -> Block | None:
        """Returns the kept rows of a block of the file `path`; None without any. Keeps unlabelled rows."""
        rows = block.rows
        if rows.labels is None or self.rate == 1:
            return block
        is_negative = rows.labels == 0
        is_kept = np.empty(rows.size, np.bool_)
        seed = (self.seed ^ key_of(1, file_label(path))) & (2**63 - 1)
        limit = np.uint64(min(int(self.rate * 2**64), 2**64 - 1))
        positions = block.positions()
        _choose(seed, positions, is_negative, limit, is_kept)
        if not is_kept.any():
            return None
        if self.is_weighted:
            weights = np.ones(rows.size, np.float32) if rows.weights is None else rows.weights
            rows = replace(
                rows, weights=np.where(is_negative, weights / np.float32(self.rate), weights)
            )
        if is_kept.all():
            return replace(block, rows=rows)
        return Block(rows_where(rows, is_kept), block.offset, positions[is_kept])


def file_label(path: str) -> str:
    """Returns the name of a file in its data set: name, folder, and the partitions (`day=1`) above it."""
    *folders, name = PurePath(path).parts
    partitions = [folder for folder in folders[:-1] if "=" in folder]
    return "/".join([*partitions, *folders[-1:], name])


@kernel
def row_hash(seed: int, row: int) -> np.uint64:
    """Returns a uniform uint64, distinct for each row of a seed."""
    return mix64(mix64(np.uint64(seed) + GAMMA) ^ np.uint64(row))


@kernel
def write_row_hashes(seed: int, first_row: int, hashes: NDArray[np.uint64]) -> None:
    """Overwrites `hashes` uint64[N] with the hashes of the rows from `first_row` on."""
    for i in range(len(hashes)):
        hashes[i] = row_hash(seed, first_row + i)


@kernel
def _choose(
    seed: int,
    positions: NDArray[np.int64],
    is_negative: NDArray[np.bool_],
    limit: np.uint64,
    is_kept: NDArray[np.bool_],
) -> None:
    """Overwrites `is_kept` bool[n]: rows other than negatives, and those with a hash below `limit`."""
    for row in range(positions.size):
        is_kept[row] = not is_negative[row] or row_hash(seed, positions[row]) < limit
