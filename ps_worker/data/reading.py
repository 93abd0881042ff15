"""One pass over file splits, by one reader or by several that share the splits."""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.batching import LabelCheck
from ps_worker.data.blocks.position import DataPosition
from ps_worker.data.blocks.reader import Block
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.formats import Format, reader_of

logger = logging.getLogger(__name__)

_SHOWN_FILES = 3


class Reading:
    """A queue of splits, each read by one reader. Thread-safe.

    Attributes:
        bad_rows: Malformed rows so far.
    """

    def __init__(
        self,
        splits: Sequence[FileSplit],
        schema: Schema,
        format: Format | None,
        bad_rows: BadRows,
        *,
        start: DataPosition | None = None,
    ) -> None:
        """Takes the splits to read; opens no file.

        Args:
            splits: In the order of reading.
            schema: The columns to read.
            format: None: determined by suffixes.
            bad_rows: Counts malformed rows.
            start: Position whose block is read first; None: the first split.

        Raises:
            DataError: If `start` is beyond the last split.
        """
        self._start = start or DataPosition()
        if self._start.split > len(splits):
            raise DataError(
                f"{start} is beyond the end of {len(splits)} files: it belongs to other files"
            )
        self._splits = splits
        self._schema = schema
        self._format = format
        self.bad_rows = bad_rows
        self._to_read = deque(list(enumerate(splits))[self._start.split :])
        self._done: list[int] = []
        self._labels = LabelCheck()

    @property
    def num_splits(self) -> int:
        """Number of splits."""
        return len(self._splits)

    @property
    def num_done(self) -> int:
        """Number of splits that were read to their end."""
        return len(self._done)

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yields the blocks of splits that no other reader has taken, with the index of the split."""
        while True:
            try:
                index, split = self._to_read.popleft()
            except IndexError:
                return
            offset = self._start.offset if index == self._start.split else None
            is_empty = offset is None
            reader = reader_of(split.path, self._schema, self.bad_rows, self._format)
            for block in reader.blocks(split, offset):
                self._labels.require(split.path, block.rows)
                yield index, block
                is_empty = False
            if is_empty and _is_whole(split):
                logger.warning("a file has no rows: file=%s", split.path)
            self._done.append(index)

    def end(self, rows: int) -> None:
        """Ends the pass: logs the number of malformed rows next to that of good `rows`.

        Raises:
            DataError: If whole files were read and had no rows.
        """
        self.bad_rows.report(rows)
        is_all = (self._start.split, self._start.offset, self._start.skip) == (0, None, 0)
        # A split may be shorter than a line, so only whole files must have rows.
        if is_all and not rows and self._splits and all(map(_is_whole, self._splits)):
            names = ", ".join(split.path for split in self._splits[:_SHOWN_FILES])
            more = ", ..." if len(self._splits) > _SHOWN_FILES else ""
            raise DataError(
                f"no rows in {len(self._splits)} files: {names}{more} "
                f"({self.bad_rows.total} malformed rows)"
            )


def _is_whole(split: FileSplit) -> bool:
    return split == FileSplit(split.path)
