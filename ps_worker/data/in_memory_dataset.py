"""A dataset in memory, shuffled locally or over all workers.

load -> | local_shuffle, global_shuffle, slots_shuffle, iterate, in any order | -> release

Iterations yield the same batches until the next shuffle. A shuffle depends on the seed, on the number of
shuffles since loading, and on the rows, so the same calls yield the same batches.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import DataPosition, digest_of_files
from ctr_ps.ps_worker.data.file_dataset import FileDataset
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import Format
from ctr_ps.ps_worker.data.global_shuffle import HasPeers, shuffle_globally
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.reading import Reading, merged
from ctr_ps.ps_worker.data.rows_in_memory import Index, RowsInMemory, SlotSwap

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0

# Purposes of random numbers, part of each generator's seed.
_LOCAL, _GLOBAL, _SLOTS = range(3)

_QUEUED_BLOCKS = 2  # per reader, waiting to be stored
_NO_ROWS = np.empty(0, np.uint32)


class InMemoryDataset(FileDataset):
    """Rows of files in memory, as batches; their order does not depend on `reader_num`. For one thread."""

    has_order = True  # whether batches have a defined order, and so positions
    bad_rows = 0  # malformed rows that the last loading skipped
    # of a loading in the background, and the malformed rows so far
    _preloading: tuple[Future[RowsInMemory], BadRows] | None = None
    _rows: RowsInMemory | None = None
    _order: Index = _NO_ROWS
    _swap: SlotSwap | None = None
    _num_shuffles = 0
    _num_slot_shuffles = 0
    _num_shuffled_globally = 0

    def _reset_counts(self) -> None:
        self._num_shuffles = 0
        self._num_slot_shuffles = 0
        self._num_shuffled_globally = 0

    def load_into_memory(self) -> None:
        """Reads all files; rows in memory are released first.

        Raises UsageError if no files were set or a loading is in progress, DataError without rows, and as
        `Reader.blocks`.
        """
        self.preload_into_memory()
        self.wait_preload_done()

    def preload_into_memory(self) -> None:
        """Starts `load_into_memory` in the background."""
        splits = self._files()
        self._require_no_preloading("another loading")
        self._set_rows(None)
        self._reset_counts()
        bad_rows = BadRows(self._bad_row_limit, self._bad_row_log)
        loaded: Future[RowsInMemory] = Future()

        def load() -> None:
            try:
                rows = load_rows(
                    splits,
                    self.schema,
                    format=self._format,
                    bad_rows=bad_rows,
                    reader_num=self._reader_num,
                    negatives=self._negatives,
                )
                loaded.set_result(rows)
            except BaseException as error:  # raised by `wait_preload_done`
                loaded.set_exception(error)

        threading.Thread(target=load, name="preload", daemon=True).start()
        self._preloading = loaded, bad_rows

    def wait_preload_done(self) -> None:
        """Waits for the end of a loading, and raises its error; UsageError without a loading."""
        if self._preloading is None:
            raise UsageError(
                "call dataset.preload_into_memory() before dataset.wait_preload_done()"
            )
        (loaded, bad_rows), self._preloading = self._preloading, None
        rows = loaded.result()
        self.bad_rows = bad_rows.total
        self._set_rows(rows)

    def release_memory(self) -> None:
        """Releases all rows and returns their memory to the system, after the end of a loading."""
        if self._preloading is not None:
            self.wait_preload_done()
        self._set_rows(None)
        self._reset_counts()

    def _set_rows(self, rows: RowsInMemory | None) -> None:
        self._rows = rows
        self._order = _NO_ROWS if rows is None else rows.in_order()
        self._swap = None

    def local_shuffle(self) -> None:
        """Shuffles the rows of this worker; raises UsageError if no rows were loaded."""
        rows = self._loaded("dataset.local_shuffle()")
        self._num_shuffles += 1
        self._order = rows.in_order()
        self._random(_LOCAL, self._num_shuffles).shuffle(self._order)

    def global_shuffle(self, fleet: HasPeers | None = None, thread_num: int | None = None) -> None:
        """Redistributes the rows of all workers at random, and shuffles them locally; collective.

        Each worker gets about the same number of rows. A worker without files takes part after loading an
        empty list. Undoes `slots_shuffle`. `fleet` is the module `ps_worker.fleet`, initialized; None: this
        is the only worker. `thread_num` is ignored; accepted as in Paddle.

        Raises UsageError if no rows were loaded, and CtrPsError if another worker has left, died or has
        incompatible rows; the rows of this worker are then lost and must be loaded again.
        """
        rows = self._loaded("dataset.global_shuffle()")
        if fleet is not None:
            peers = fleet.peers()
            random = self._random(_GLOBAL, self._num_shuffles + 1, peers.worker)
            self._set_rows(None)
            self._set_rows(shuffle_globally(rows, peers, random))
        self.local_shuffle()
        self._num_shuffled_globally = self.get_memory_data_size()

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Permutes the values of `slots` over the rows, to measure the importance of these slots.

        Slots permuted together stay together. Each call undoes the previous one; an empty list only undoes.
        Raises UsageError if no rows were loaded, or a slot is unknown.
        """
        rows = self._loaded("dataset.slots_shuffle()")
        for slot in slots:
            if slot not in self.schema.slots:
                raise UsageError(
                    f"no slot {slot!r}, expected one of {', '.join(self.schema.slots)}"
                )
        self._swap = None
        if slots:
            self._num_slot_shuffles += 1
            order = rows.in_order()
            donors = np.empty_like(order)
            donors[order] = self._random(_SLOTS, self._num_slot_shuffles).permutation(order)
            is_swapped = np.array([slot in slots for slot in self.schema.slots])
            self._swap = SlotSwap(donors, is_swapped)

    def _random(self, *purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed, *purpose]))

    def __iter__(self) -> Iterator[Batch]:
        """Yields all rows, in batches of B and a smaller last one; UsageError if no rows were loaded."""
        return (batch for batch, _ in self.positioned())

    def head(self) -> Iterator[Batch]:
        """Yields the rows in memory, as their files may be gone."""
        return iter(self)

    def positioned(self, start: DataPosition | None = None) -> Iterator[tuple[Batch, DataPosition]]:
        """Yields batches of all rows, or of those after a position, each with the position after it.

        The epoch of `start` is the number of shuffles, its offset a row in the shuffled order. Raises
        UsageError if no rows were loaded, or `start` has another seed, number of shuffles or files, and
        DataError if it is beyond the last row.
        """
        rows = self._loaded("a pass over the dataset")
        files = digest_of_files(self._splits or [], is_shuffled=False)
        first = DataPosition(epoch=self._num_shuffles, seed=self._seed, offset=0, files=files)
        start = start or first
        if start.files != files:
            raise UsageError("the position belongs to other files, not the loaded ones")
        if (start.seed, start.epoch) != (first.seed, first.epoch):
            raise UsageError(
                f"the position has seed {start.seed} and {start.epoch} shuffles, but the dataset has seed "
                f"{first.seed} and {first.epoch}: load and shuffle as before"
            )
        if (row := (start.offset or 0) + start.skip) > rows.size:
            raise DataError(
                f"{start} is beyond the end of {counted(rows.size, 'row')}: it belongs to other files"
            )
        return self._batches(rows, self._order, self._swap, row, first)

    def _batches(
        self, rows: RowsInMemory, order: Index, swap: SlotSwap | None, row: int, first: DataPosition
    ) -> Iterator[tuple[Batch, DataPosition]]:
        """Yields batches from a row on, unaffected by later shuffles and loadings.

        Raises UsageError if a global shuffle has released the rows.
        """
        for begin in range(row, rows.size, self.batch_size):
            if rows.are_released:
                raise UsageError(
                    "dataset.global_shuffle() was called in the middle of this pass and sent its rows to "
                    "other workers: finish a pass before the shuffle, or begin a new pass after it"
                )
            index = order[begin : begin + self.batch_size]
            yield rows.gather(index, swap), replace(first, offset=begin + index.size)

    def get_memory_data_size(self, fleet: HasPeers | None = None) -> int:
        """Returns the number of rows of this worker, or with `fleet`, collectively, of all workers."""
        return _size(0 if self._rows is None else self._rows.size, fleet)

    def get_shuffle_data_size(self, fleet: HasPeers | None = None) -> int:
        """Returns the number of rows after the last global shuffle since loading, 0 before the first.

        With `fleet`, collectively, of all workers.
        """
        return _size(self._num_shuffled_globally, fleet)

    def _loaded(self, call: str) -> RowsInMemory:
        self._require_no_preloading(call)
        if self._rows is None:
            raise UsageError(f"call dataset.load_into_memory() before {call}")
        return self._rows

    def _require_no_preloading(self, call: str) -> None:
        if self._preloading is not None:
            raise UsageError(
                f"call dataset.wait_preload_done() before {call}: files are being loaded"
            )


def _size(rows: int, fleet: HasPeers | None) -> int:
    return rows if fleet is None else fleet.peers().total(rows)[0]


def load_rows(
    splits: Sequence[FileSplit],
    schema: Schema,
    *,
    format: Format | None,
    bad_rows: BadRows,
    reader_num: int,
    negatives: NegativeSampling | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RowsInMemory:
    """Returns the rows of all splits, possibly none, and logs the progress by `clock`, in seconds.

    The index of a split is the source of its rows. Raises DataError if whole files have no rows.
    """
    rows = RowsInMemory(schema.num_dense, len(schema.slots))
    reading = Reading(splits, schema, format, bad_rows, negatives=negatives)
    readers = [reading.blocks() for _ in range(min(reader_num, len(splits)))]
    start = logged = clock()

    def log(stage: str, now: float) -> None:
        logger.info(
            "%s: files=%d/%d rows=%d MB=%d rows/s=%d",
            stage,
            len(reading.done),
            reading.num_splits,
            rows.size,
            rows.size_bytes // 10**6,
            rows.size / (now - start) if now > start else 0,
        )

    with closing(merged(readers, capacity=_QUEUED_BLOCKS * reader_num)) as blocks:
        for source, block in blocks:
            try:
                rows.extend(block.rows, source)
            except DataError as error:
                raise DataError(f"{splits[source].path}: {error}") from error
            if (now := clock()) - logged >= PROGRESS_EVERY_S:
                logged = now
                log("loading into memory", now)
    reading.end(rows.size)
    log("loaded into memory", clock())
    return rows
