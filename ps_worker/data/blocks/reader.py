"""The interface of file readers: file splits in, blocks of rows out.

split --Reader.blocks--> Block | Block | ...     in file order
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ctr_model.batch import Batch
from ps_worker.data.files.file_split import FileSplit


@dataclass(frozen=True, slots=True)
class Block:
    """A block of rows from a reader.

    Attributes:
        rows: At least one.
        offset: Position of the block in the file, from which `Reader.blocks` can resume: bytes of the
            (decompressed) content in text, rows in Parquet and ORC.
    """

    rows: Batch
    offset: int


class Reader(Protocol):
    """Reads the files of one format. Thread-safe: several threads may read different splits."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns at most `num_splits` splits of a file, of about the same size, ordered and disjoint.

        Raises:
            DataError: Names the file that cannot be read.
        """
        ...

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split in file order.

        Args:
            split: The split to read.
            offset: `Block.offset` to resume from; None: the start of the split.

        Raises:
            DataError: Names the file that cannot be read, is damaged or does not match the schema.
            BadRowError: Names the malformed row that exceeded the limit.
        """
        ...
