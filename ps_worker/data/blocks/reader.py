"""What a reader of files is: splits of files in, blocks of rows out.

split --Reader.blocks--> Block | Block | ...     in the order of the file
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ctr_model.batch import Batch
from ps_worker.data.files.file_split import FileSplit


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that were read together.

    Attributes:
        rows: At least one.
        offset: From where `Reader.blocks` begins with these rows again; a position in the file, in units of
            the format: bytes of the content of text, rows of Parquet and ORC.
    """

    rows: Batch
    offset: int


class Reader(Protocol):
    """Reads the files of one format. Several threads may use it at once, each for another split."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Cuts a file into at most `num_splits` splits of about the same size, in order, without overlap.

        Raises:
            DataError: Names the file that cannot be read.
        """
        ...

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split in order.

        Args:
            split: What to read.
            offset: A block's, to begin with that block's rows; None: from the start of the split.

        Raises:
            DataError: Names the file that cannot be read, is damaged or does not fit the schema.
            BadRowError: Names the malformed row beyond the limit.
        """
        ...
