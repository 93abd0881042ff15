"""What a reader of files is: parts of files in, blocks of rows out.

part --Reader.blocks--> Block | Block | ...     in the order of the file
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ctr_model.batch import Batch


@dataclass(frozen=True, slots=True)
class FilePart:
    """What is read of a file, in units of its format.

    Text counts bytes, and a line belongs to the part in which it begins; Parquet counts row groups, ORC
    stripes. Compressed text cannot be cut.

    Attributes:
        path: Local path or URL.
        start: First unit.
        stop: After the last unit; None: to the end of the file.
    """

    path: str
    start: int = 0
    stop: int | None = None


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
    """Reads the files of one format. Several threads may use it at once, each for another part."""

    def parts(self, path: str, num_parts: int) -> list[FilePart]:
        """Cuts a file into at most `num_parts` parts of about the same size, in order, without overlap.

        Raises:
            DataError: Names the file that cannot be read.
        """
        ...

    def blocks(self, part: FilePart, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a part in order.

        Args:
            part: What to read.
            offset: A block's, to begin with that block's rows; None: from the start of the part.

        Raises:
            DataError: Names the file that cannot be read, is damaged or does not fit the schema.
            BadRowError: Names the malformed row beyond the limit.
        """
        ...
