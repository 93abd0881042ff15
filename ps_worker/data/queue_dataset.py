"""A dataset that is never whole in memory: files are read while they are trained on.

one reader: in order    parts --Reader--> blocks --batching--> batches, with positions
several: in any order   parts --> reader threads, a part each --> bounded queue --> batches
"""

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import DataError, UsageError
from ps_worker.data.bad_rows import BadRows
from ps_worker.data.batching import OneKindOfRows, batches
from ps_worker.data.file_split import shuffled
from ps_worker.data.formats import Format, reader_of, require_format
from ps_worker.data.position import DataPosition
from ps_worker.data.reader import Block, FilePart
from ps_worker.data.reader_threads import merged

logger = logging.getLogger(__name__)

_QUEUED_BATCHES = 4  # that wait for training, for each reader
_SHOWN_FILES = 3


class QueueDataset:
    """Files as batches; each iteration is the next epoch, a pass over all of them.

    Attributes:
        schema: The columns of the files.
        batch_size: B.
        thread_num: Training threads that share its batches.
    """

    def __init__(
        self,
        schema: Schema,
        batch_size: int,
        thread_num: int = 1,
        *,
        format: Format | None = None,
        bad_row_limit: int = 0,
        reader_num: int = 1,
        shuffle_files: bool = False,
        seed: int = 0,
    ) -> None:
        """Has no files yet.

        Args:
            schema: The columns of the files.
            batch_size: B, at least 1.
            thread_num: Training threads, at least 1.
            format: Of the files, as docs/data.md lists them, or what makes a reader of one's own; None: the
                end of a file's name tells.
            bad_row_limit: Malformed rows that an iteration skips before it stops.
            reader_num: Threads that read, a file or part each; 1: who iterates reads, and batches run on
                across files in the order of these. With more the order is free.
            shuffle_files: Whether each epoch has an order of files of its own.
            seed: Of these orders.

        Raises:
            UsageError: If a number is too small, or there is no such format.
        """
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("thread_num", thread_num, 1),
            ("bad_row_limit", bad_row_limit, 0),
            ("reader_num", reader_num, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise UsageError(f"{name} is {value!r}, expected at least {least}")
        if isinstance(format, str):
            require_format(format)
        self.schema = schema
        self.batch_size = batch_size
        self.thread_num = thread_num
        self._format = format
        self._bad_row_limit = bad_row_limit
        self._reader_num = reader_num
        self._shuffle_files = shuffle_files
        self._seed = seed
        self._parts: list[FilePart] | None = None
        self._epoch = 0
        self._pass: _Pass | None = None

    def set_filelist(self, files: Sequence[str | Path | FilePart]) -> None:
        """Sets what to read, in this order: of a worker, its share as `fleet.split_files` returns it."""
        if isinstance(files, str):
            raise UsageError(f"files is {files!r}, expected a list of paths")
        self._parts = [
            file if isinstance(file, FilePart) else FilePart(str(file)) for file in files
        ]

    @property
    def rows(self) -> int:
        """Rows that the last iteration gave so far."""
        return 0 if self._pass is None else self._pass.rows

    @property
    def bad_rows(self) -> int:
        """Malformed rows that the last iteration skipped so far."""
        return 0 if self._pass is None else self._pass.bad_rows.total

    def __iter__(self) -> Generator[Batch, None, None]:
        """Reads the next epoch; `close` ends reader threads at once, as dropping the iterator does.

        Raises:
            UsageError: If no files were set.
            DataError: While iterating: names the file that cannot be read, is damaged or does not fit; or
                says that there are no rows at all.
            BadRowError: While iterating: names file, place and fault of the malformed row beyond the limit.
        """
        if self._reader_num == 1:
            return (batch for batch, _ in self.positioned())
        start = DataPosition(epoch=self._epoch + 1, seed=self._seed)
        return self._begin(start).merged_batches(self._reader_num)

    def positioned(self, start: DataPosition | None = None) -> Iterator[tuple[Batch, DataPosition]]:
        """Reads the next epoch, or what is left of one.

        Args:
            start: Position after which to go on, of a dataset with the same files and settings; None: the
                next epoch, from its start.

        Yields:
            Batches, and the position after each.

        Raises:
            UsageError: If no files were set, there is more than one reader, or `start` is of another seed.
            DataError: As for an iteration; also if `start` is beyond the end of these files.
        """
        if self._reader_num != 1:
            raise UsageError(
                f"reader_num is {self._reader_num}: only one reader gives batches an order, and so a position"
            )
        if start is None:
            start = DataPosition(epoch=self._epoch + 1, seed=self._seed)
        if start.seed != self._seed:
            raise UsageError(
                f"the position is of seed {start.seed}, and the dataset's seed is {self._seed}: the order of "
                f"its files is another one"
            )
        return self._begin(start).batches()

    def _begin(self, start: DataPosition) -> "_Pass":
        if self._parts is None:
            raise UsageError("the dataset has no files: call dataset.set_filelist(files) first")
        parts = self._parts
        if self._shuffle_files:
            parts = shuffled(parts, self._seed, start.epoch)
        self._epoch = start.epoch
        self._pass = _Pass(
            self.schema, self.batch_size, self._format, BadRows(self._bad_row_limit), parts, start
        )
        return self._pass


class _Pass:
    """One iteration.

    Attributes:
        rows: Given so far.
        bad_rows: Skipped so far.
    """

    def __init__(
        self,
        schema: Schema,
        batch_size: int,
        format: Format | None,
        bad_rows: BadRows,
        parts: Sequence[FilePart],
        start: DataPosition,
    ) -> None:
        self._schema = schema
        self._batch_size = batch_size
        self._format = format
        self._parts = parts
        self._start = start
        self._to_read = deque(enumerate(parts))
        self._kind = OneKindOfRows()
        self.bad_rows = bad_rows
        self.rows = 0

    def batches(self) -> Iterator[tuple[Batch, DataPosition]]:
        """Yields batches in the order of the parts, from the start position on."""
        if self._start.part > len(self._parts):
            raise DataError(
                f"{self._start} is beyond the end of {len(self._parts)} files: they are not those it is of"
            )
        for _ in range(self._start.part):
            self._to_read.popleft()
        for batch, position in batches(self._blocks(), self._batch_size, self._start):
            self.rows += batch.size
            yield batch, position
        self._end()

    def merged_batches(self, reader_num: int) -> Generator[Batch, None, None]:
        """Yields batches of several readers as they come."""
        readers = [
            batches(self._blocks(), self._batch_size, self._start)
            for _ in range(min(reader_num, len(self._parts)))
        ]
        for batch, _ in merged(readers, capacity=_QUEUED_BATCHES * reader_num):
            self.rows += batch.size
            yield batch
        self._end()

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        """Yields the blocks of parts that nobody has taken yet."""
        while self._to_read:
            try:
                index, part = self._to_read.popleft()
            except IndexError:  # another reader was quicker
                return
            offset = self._start.offset if index == self._start.part else None
            is_empty = offset is None
            reader = reader_of(part.path, self._schema, self.bad_rows, self._format)
            for block in reader.blocks(part, offset):
                self._kind.require(part.path, block.rows)
                yield index, block
                is_empty = False
            if is_empty and _is_whole(part):
                logger.warning("a file has no rows: file=%s", part.path)

    def _end(self) -> None:
        self.bad_rows.report(self.rows)
        is_all = self._start == DataPosition(epoch=self._start.epoch, seed=self._start.seed)
        # A part of a file may be shorter than a line.
        if is_all and not self.rows and self._parts and all(map(_is_whole, self._parts)):
            names = ", ".join(part.path for part in self._parts[:_SHOWN_FILES])
            more = ", ..." if len(self._parts) > _SHOWN_FILES else ""
            raise DataError(
                f"no rows in {len(self._parts)} files: {names}{more} "
                f"({self.bad_rows.total} malformed rows)"
            )


def _is_whole(part: FilePart) -> bool:
    return part == FilePart(part.path)
