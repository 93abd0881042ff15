"""Files into memory: reader threads, a part of a file each, and a line of progress every few seconds."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.bad_rows import BadRows
from ps_worker.data.batching import OneKindOfRows
from ps_worker.data.formats import Format, reader_of
from ps_worker.data.reader import Block, FilePart
from ps_worker.data.reader_threads import merged
from ps_worker.data.rows_in_memory import RowsInMemory

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0

_QUEUED_BLOCKS = 2  # that wait to be stored, for each reader


def load_rows(
    parts: Sequence[FilePart],
    schema: Schema,
    *,
    format: Format | None,
    bad_rows: BadRows,
    reader_num: int,
    clock: Callable[[], float] = time.monotonic,
) -> RowsInMemory:
    """Returns the rows of all parts; their number in `parts` is their source.

    Args:
        parts: What to read; none gives no rows.
        schema: Of the rows.
        format: Of the files; None: their names tell.
        bad_rows: Counts malformed rows.
        reader_num: Threads that read.
        clock: Seconds, for the progress.

    Raises:
        DataError: Names the file that cannot be read, is damaged or does not fit; or says that whole files
            have no rows at all.
        BadRowError: Names file, place and fault of the malformed row beyond the limit.
    """
    rows = RowsInMemory(schema.num_dense, len(schema.slots))
    reading = _Reading(parts, schema, format, bad_rows)
    progress = _Progress(len(parts), rows, clock)
    readers = [reading.blocks() for _ in range(min(reader_num, len(parts)))]
    with closing(merged(readers, capacity=_QUEUED_BLOCKS * reader_num)) as blocks:
        for source, block in blocks:
            if block is None:
                progress.num_done += 1
            else:
                rows.extend(block.rows, source)
            progress.show_if_due()
    bad_rows.report(rows.size)
    if parts and not rows.size and all(map(_is_whole, parts)):
        raise DataError(
            f"no rows in {len(parts)} files: {parts[0].path}, ... ({bad_rows.total} malformed)"
        )
    progress.show("loaded into memory")
    return rows


class _Reading:
    """Parts that readers share, each of them read by one. Thread-safe."""

    def __init__(
        self, parts: Sequence[FilePart], schema: Schema, format: Format | None, bad_rows: BadRows
    ) -> None:
        self._to_read = deque(enumerate(parts))
        self._schema = schema
        self._format = format
        self._bad_rows = bad_rows
        self._kind = OneKindOfRows()

    def blocks(self) -> Iterator[tuple[int, Block | None]]:
        """Yields the blocks of parts that nobody else has taken, with their number; None after each part."""
        while True:
            try:
                source, part = self._to_read.popleft()
            except IndexError:
                return
            is_empty = True
            reader = reader_of(part.path, self._schema, self._bad_rows, self._format)
            for block in reader.blocks(part):
                self._kind.require(part.path, block.rows)
                yield source, block
                is_empty = False
            if is_empty and _is_whole(part):
                logger.warning("a file has no rows: file=%s", part.path)
            yield source, None


class _Progress:
    """Says how far loading is, every few seconds."""

    def __init__(self, num_files: int, rows: RowsInMemory, clock: Callable[[], float]) -> None:
        self.num_done = 0
        self._num_files = num_files
        self._rows = rows
        self._clock = clock
        self._start = self._shown = clock()

    def show_if_due(self) -> None:
        """Logs a line if the last one is old enough."""
        if self._clock() - self._shown >= PROGRESS_EVERY_S:
            self.show("loading into memory")

    def show(self, what: str) -> None:
        """Logs a line."""
        self._shown = self._clock()
        seconds = self._shown - self._start
        logger.info(
            "%s: files=%d/%d rows=%d MB=%d rows/s=%d",
            what,
            self.num_done,
            self._num_files,
            self._rows.size,
            self._rows.size_bytes // 10**6,
            self._rows.size / seconds if seconds else 0,
        )


def _is_whole(part: FilePart) -> bool:
    """Whether it is a whole file: part of one may be shorter than a line."""
    return part == FilePart(part.path)
