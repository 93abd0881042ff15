"""The interface of file readers: file splits in, blocks of rows out.

split --Reader.blocks--> Block | Block | ...     in file order
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ps_worker.data.files.file_split import FileSplit


@dataclass(frozen=True, slots=True)
class Block:
    """A block of rows from a reader."""

    rows: Batch  # at least one
    # position in the file, from which `Reader.blocks` can resume: bytes of the (decompressed)
    # content in text, rows in Parquet and ORC
    offset: int
    # int64[n], positions of the rows; None: offsets count rows, and these are consecutive
    row_offsets: NDArray[np.int64] | None = None

    def positions(self) -> NDArray[np.int64]:
        """Returns int64[n], numbers of the rows, unique in the file and the same in every reading."""
        if self.row_offsets is not None:
            return self.row_offsets
        return np.arange(self.offset, self.offset + self.rows.size, dtype=np.int64)


class Reader(Protocol):
    """Reads the files of one format. Thread-safe: several threads may read different splits."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns at most `num_splits` splits of a file, of similar size, ordered and disjoint.

        Raises a DataError that names the file if it cannot be read.
        """
        ...

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split in file order, from `Block.offset` or its start.

        Raises:
            DataError: Names the file that cannot be read, is damaged or does not match the schema.
            BadRowError: Names the malformed row that exceeded the limit.
        """
        ...
