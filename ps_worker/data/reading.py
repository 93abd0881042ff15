"""One pass over file splits, by one reader or by several in threads that share the splits."""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Generic, TypeVar

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError, DataError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRowLog, BadRows
from ctr_ps.ps_worker.data.blocks import Block, DataPosition, RowColumnCheck
from ctr_ps.ps_worker.data.files.content import suffix_of
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import require_unchanged
from ctr_ps.ps_worker.data.formats import Format, doubt_about, doubt_about_rows, reader_of
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling

logger = logging.getLogger(__name__)

T = TypeVar("T")

STALL_LIMIT_S = 600.0
JOIN_LIMIT_S = 30.0

_SHOWN_FILES = 3
_TRIED_ROWS = 1000


class Reading:
    """A queue of splits, each read by one reader, with the malformed rows so far. Thread-safe."""

    def __init__(
        self,
        splits: Sequence[FileSplit],
        schema: Schema,
        format: Format | None,
        bad_rows: BadRows,
        *,
        start: DataPosition | None = None,
        negatives: NegativeSampling | None = None,
    ) -> None:
        """Takes the splits in reading order; the block of `start` is read first. Opens no file.

        Other arguments are those of `FileDataset`. Raises DataError if `start` is beyond the last split.
        """
        self._start = start or DataPosition()
        if self._start.split > len(splits):
            raise DataError(
                f"{start} is beyond the end of {counted(len(splits), 'file')}: it belongs to other files"
            )
        self.num_splits = len(splits)
        self._splits = splits
        self._schema = schema
        self._format = format
        self._negatives = negatives
        self.bad_rows = bad_rows
        self.rows = 0  # yielded so far by the dataset that reads
        self._to_read = deque(list(enumerate(splits))[self._start.split :])
        self.done: list[int] = []  # splits read to their end
        self._columns = RowColumnCheck(schema)

    def blocks(self) -> Generator[tuple[int, Block], None, None]:
        """Yields the blocks of splits that no other reader has taken, with the index of the split.

        Raises DataError as `Reader.blocks`, for a file whose rows are all malformed, and for one that has
        changed since it was listed, before it is read or at its end.
        """
        while True:
            try:
                index, _ = self._to_read.popleft()
            except IndexError:
                return
            yield from self.blocks_of(
                index, self._start.offset if index == self._start.split else None
            )

    def blocks_of(
        self, index: int, offset: int | None = None
    ) -> Generator[tuple[int, Block], None, None]:
        """Yields the blocks of one split, as `blocks`, from an offset or its start."""
        split, is_empty = self._splits[index], offset is None
        _require_listed(split)
        if suffix_of(split.path):
            doubt_about(split.path, self._format)  # refuses files other than text
        reader = reader_of(split.path, self._schema, self.bad_rows, self._format)
        try:
            for block in reader.blocks(split, offset):
                self._columns.require(split.path, block.rows)
                is_empty = False
                if self._negatives is None:
                    yield index, block
                elif (sampled := self._negatives.sampled(split.path, block)) is not None:
                    yield index, sampled
        except BadRowError as error:
            if is_empty and (verdict := self._verdict(split)):
                raise BadRowError(f"{error}; {verdict}") from error
            raise
        _require_listed(split)
        if is_empty:
            self._log_empty(split)
        self.done.append(index)

    def _log_empty(self, split: FileSplit) -> None:
        if self.bad_rows.of_file(split.path):
            if verdict := self._verdict(split):
                self.bad_rows.log.file(split.path, verdict)
        elif _is_whole(split):
            logger.warning("a file has no rows: file=%s", split.path)

    def _verdict(self, split: FileSplit) -> str:
        """Returns the fault of a split whose several rows are all malformed; else ""."""
        tried = BadRows(_TRIED_ROWS, BadRowLog(is_silent=True))
        which = "all its {} rows"
        try:
            for _ in reader_of(split.path, self._schema, tried, self._format).blocks(split):
                return ""
        except BadRowError:
            which = "its first {} rows"
        if tried.total < 2:
            return ""
        return (
            f"{which.format(tried.total)} are malformed: the schema or the format is probably wrong "
            f"(data.schema, data.format); the first is {tried.first}"
            f"{doubt_about_rows(split.path, self._format)}"
        )

    def end(self, rows: int) -> None:
        """Ends the pass: logs the number of malformed rows beside that of good `rows`.

        Raises DataError if whole files were read and had no rows.
        """
        self.bad_rows.report(rows)
        is_all = (self._start.split, self._start.offset, self._start.skip) == (0, None, 0)
        # A split may be shorter than a line, so only whole files must have rows.
        if is_all and not rows and self._splits and all(map(_is_whole, self._splits)):
            names = ", ".join(split.path for split in self._splits[:_SHOWN_FILES])
            more = ", ..." if len(self._splits) > _SHOWN_FILES else ""
            cause = self.bad_rows.first and (
                ": the schema or the format is probably wrong (data.schema, data.format); the first is "
                f"{self.bad_rows.first}{doubt_about_rows(self._splits[0].path, self._format)}"
            )
            raise DataError(
                f"no rows in {counted(len(self._splits), 'file')}: {names}{more} "
                f"({counted(self.bad_rows.total, 'malformed row')}){cause}"
            )


def _require_listed(split: FileSplit) -> None:
    if split.stamp is not None:
        require_unchanged(split.path, split.stamp)


def _is_whole(split: FileSplit) -> bool:
    return split == FileSplit(split.path)


def merged(
    sources: Sequence[Iterator[T]],  # each is consumed by its own thread
    *,
    capacity: int,  # size of the queue, at which sources wait
    stall_limit_s: float = STALL_LIMIT_S,  # the longest wait for an item of any source
    # the longest wait for the threads at the end; a stuck one is abandoned with a warning
    join_limit_s: float = JOIN_LIMIT_S,
) -> Generator[T, None, None]:
    """Yields the items of several iterators in order of arrival; closing the generator ends the threads.

    Raises the first error of any source, and DataError if none yields an item or ends for `stall_limit_s`.
    """
    queue = _Queue[T](len(sources), capacity, stall_limit_s)
    threads = [
        threading.Thread(target=queue.fill, args=(source,), name=f"reader-{number}", daemon=True)
        for number, source in enumerate(sources)
    ]
    try:
        for thread in threads:
            thread.start()
        while (item := queue.take()) is not None:
            yield item[0]
    finally:
        queue.close()
        deadline = time.monotonic() + join_limit_s
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("abandoned a stuck reader: thread=%s", thread.name)


class _Queue(Generic[T]):
    """A bounded queue with several sources. Thread-safe."""

    def __init__(self, num_sources: int, capacity: int, stall_limit_s: float) -> None:
        self._changed = threading.Condition()
        self._items: deque[tuple[T]] = deque()
        self._num_running = num_sources
        self._capacity = capacity
        self._stall_limit_s = stall_limit_s
        self._error: BaseException | None = None
        self._is_closed = False

    def fill(self, source: Iterator[T]) -> None:
        try:
            for item in source:
                with self._changed:
                    # No time limit: the consumer may train for any time between two items.
                    self._changed.wait_for(
                        lambda: self._is_closed or len(self._items) < self._capacity
                    )
                    if self._is_closed:
                        break
                    self._items.append((item,))
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            if isinstance(source, Generator):
                source.close()
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def take(self) -> tuple[T] | None:
        """Returns an item as a 1-tuple; None once all sources have ended."""
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._items or self._error is not None or not self._num_running,
                self._stall_limit_s,
            )
            if self._error is not None:
                raise self._error
            if not is_there:
                raise DataError(
                    f"no reader has read a row for {self._stall_limit_s:g} s: is the storage reachable?"
                )
            if not self._items:
                return None
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
