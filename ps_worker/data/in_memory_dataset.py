"""A dataset that is whole in memory, and is shuffled there: alone, or over all workers.

load -> | local_shuffle, global_shuffle, slots_shuffle, iterate, in any order | -> release

Each iteration gives the same batches until rows are shuffled again. A shuffle depends on the seed, on its
number since the rows were loaded, and on the rows: who loads and shuffles alike has the same batches again.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import DataError, UsageError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.position import DataPosition, digest_of_files
from ps_worker.data.file_dataset import FileDataset
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.formats import Format
from ps_worker.data.memory.global_shuffle import shuffle_globally
from ps_worker.data.memory.loading import load_rows
from ps_worker.data.memory.peers import HasPeers
from ps_worker.data.memory.rows import Index, RowsInMemory, SlotSwap

# What random numbers are drawn for, so that no two kinds of draws are the same.
_LOCAL, _GLOBAL, _SLOTS = range(3)


class InMemoryDataset(FileDataset):
    """Rows of files, in memory, as batches. For one thread.

    Attributes:
        schema: The columns of the files.
        batch_size: B.
        thread_num: Training threads that share its batches.
        bad_rows: Malformed rows that the last loading skipped.
        has_order: Batches have an order, and so positions.
    """

    has_order = True

    def __init__(
        self,
        schema: Schema,
        batch_size: int,
        thread_num: int = 1,
        *,
        format: Format | None = None,
        bad_row_limit: int = 0,
        reader_num: int = 1,
        seed: int = 0,
    ) -> None:
        """Has no files and no rows yet.

        Args:
            schema: The columns of the files.
            batch_size: B, at least 1.
            thread_num: Training threads, at least 1.
            format: Of the files, as docs/data.md lists them, or what makes a reader of one's own; None: the
                end of a file's name tells.
            bad_row_limit: Malformed rows that a loading skips before it stops.
            reader_num: Threads that read, a file or split each; the order of rows does not depend on it.
            seed: Of all shuffles, the same on all workers.

        Raises:
            UsageError: If a number is too small, or there is no such format.
        """
        super().__init__(
            schema,
            batch_size,
            thread_num,
            format=format,
            bad_row_limit=bad_row_limit,
            reader_num=reader_num,
            seed=seed,
        )
        self.bad_rows = 0
        self._preloading: _Preloading | None = None
        self._rows: RowsInMemory | None = None
        self._order: Index = np.empty(0, np.uint32)
        self._swap: SlotSwap | None = None
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._num_shuffles = 0
        self._num_slot_shuffles = 0
        self._num_shuffled_globally = 0

    # Loading

    def load_into_memory(self) -> None:
        """Reads all files; rows that were in memory are released first.

        Raises:
            UsageError: If no files were set, or they are being loaded.
            DataError: Names the file that cannot be read, is damaged or does not fit; or says that there are
                no rows at all.
            BadRowError: Names file, place and fault of the malformed row beyond the limit.
        """
        self.preload_into_memory()
        self.wait_preload_done()

    def preload_into_memory(self) -> None:
        """Begins to read all files in the background; rows that were in memory are released first.

        Raises:
            UsageError: If no files were set, or they are being loaded.
        """
        splits = self._files()
        self._require_no_preloading("another loading")
        self._set_rows(None)
        self._reset_counts()
        bad_rows = BadRows(self._bad_row_limit)
        self._preloading = _Preloading(
            splits, self.schema, self._format, bad_rows, self._reader_num
        )

    def wait_preload_done(self) -> None:
        """Waits until all is read.

        Raises:
            UsageError: If nothing is being loaded.
            CtrPsError: What the loading raised, as `load_into_memory` does.
        """
        if self._preloading is None:
            raise UsageError("dataset.preload_into_memory() before dataset.wait_preload_done()")
        preloading, self._preloading = self._preloading, None
        rows = preloading.wait()
        self.bad_rows = preloading.bad_rows.total
        self._set_rows(rows)

    def release_memory(self) -> None:
        """Forgets all rows, and gives their memory back to the system; what is being loaded is waited for."""
        if self._preloading is not None:
            self.wait_preload_done()
        self._set_rows(None)
        self._reset_counts()

    def _set_rows(self, rows: RowsInMemory | None) -> None:
        self._rows = rows
        self._order = np.empty(0, np.uint32) if rows is None else rows.in_order()
        self._swap = None

    # Shuffling

    def local_shuffle(self) -> None:
        """Puts the rows of this worker into a random order.

        Raises:
            UsageError: If no rows were loaded.
        """
        rows = self._loaded("dataset.local_shuffle()")
        self._num_shuffles += 1
        self._order = rows.in_order()
        self._random(_LOCAL, self._num_shuffles).shuffle(self._order)

    def global_shuffle(self, fleet: HasPeers | None = None, thread_num: int | None = None) -> None:
        """Deals the rows of all workers at random to all workers, and shuffles them there; all call it.

        Each worker has about as many rows then, whatever it had before; one without files, or with an empty
        list of them, takes part. What `slots_shuffle` swapped is swapped back.

        Args:
            fleet: The module `ps_worker.fleet`, of a worker that has begun; None: there is no other worker.
            thread_num: As in Paddle; has no meaning here.

        Raises:
            UsageError: If no rows were loaded.
            CtrPsError: If another worker has left, died or has other rows; the rows of this worker are lost
                then, and must be loaded again.
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
        """Gives each row the values that another, random row has in `slots`: how much do they matter?

        The swap is undone by the next one, so a loop over slots swaps one at a time; no slots: undo only.
        Slots that are swapped together come from the same row.

        Raises:
            UsageError: If no rows were loaded, or the schema has no such slot.
        """
        rows = self._loaded("dataset.slots_shuffle()")
        for slot in slots:
            if slot not in self.schema.slots:
                raise UsageError(f"no slot {slot!r}, there are {', '.join(self.schema.slots)}")
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

    # Reading

    def __iter__(self) -> Iterator[Batch]:
        """Gives all rows, in batches of B and a last one of what is left.

        Raises:
            UsageError: If no rows were loaded.
        """
        return (batch for batch, _ in self.positioned())

    def positioned(self, start: DataPosition | None = None) -> Iterator[tuple[Batch, DataPosition]]:
        """Gives all rows, or what is left of them.

        Args:
            start: Position after which to go on, of a dataset that was loaded and shuffled alike; its epoch
                is the number of shuffles, its offset a row in the shuffled order. None: from the first row.

        Yields:
            Batches, and the position after each.

        Raises:
            UsageError: If no rows were loaded, or `start` is of another seed or number of shuffles.
            DataError: If `start` is beyond the last row.
        """
        rows = self._loaded("a pass over the dataset")
        files = digest_of_files(self._splits or [], is_shuffled=False)
        first = DataPosition(epoch=self._num_shuffles, seed=self._seed, offset=0, files=files)
        start = start or first
        if start.files != files:
            raise UsageError("the position is of other files than those that were loaded here")
        if (start.seed, start.epoch) != (first.seed, first.epoch):
            raise UsageError(
                f"the position is of seed {start.seed} and {start.epoch} shuffles, and the dataset of seed "
                f"{first.seed} and {first.epoch}: load and shuffle as before"
            )
        if (row := (start.offset or 0) + start.skip) > rows.size:
            raise DataError(
                f"{start} is beyond the end of {rows.size} rows: these are not its files"
            )
        return self._batches(rows, self._order, self._swap, row, first)

    def _batches(
        self, rows: RowsInMemory, order: Index, swap: SlotSwap | None, row: int, first: DataPosition
    ) -> Iterator[tuple[Batch, DataPosition]]:
        """Yields batches from a row on; of rows and order as they were, whatever happens meanwhile.

        Raises:
            UsageError: If rows were dealt to other workers meanwhile.
        """
        for begin in range(row, rows.size, self.batch_size):
            if rows.are_released:
                raise UsageError(
                    "dataset.global_shuffle() in the middle of a pass: its rows have gone to other "
                    "workers, so end the pass before, or begin another one"
                )
            index = order[begin : begin + self.batch_size]
            yield rows.gather(index, swap), replace(first, offset=begin + index.size)

    # Sizes

    def get_memory_data_size(self, fleet: HasPeers | None = None) -> int:
        """Returns how many rows are in memory here; given a fleet, on all workers, which all must ask."""
        return _size(0 if self._rows is None else self._rows.size, fleet)

    def get_shuffle_data_size(self, fleet: HasPeers | None = None) -> int:
        """Returns how many rows the last global shuffle left here; given a fleet, on all workers.

        0 if there was none since they were loaded.
        """
        return _size(self._num_shuffled_globally, fleet)

    def _loaded(self, call: str) -> RowsInMemory:
        self._require_no_preloading(call)
        if self._rows is None:
            raise UsageError(f"dataset.load_into_memory() before {call}")
        return self._rows

    def _require_no_preloading(self, call: str) -> None:
        if self._preloading is not None:
            raise UsageError(f"dataset.wait_preload_done() before {call}: files are being loaded")


class _Preloading:
    """A loading in the background.

    Attributes:
        bad_rows: Malformed rows so far.
    """

    def __init__(
        self,
        splits: Sequence[FileSplit],
        schema: Schema,
        format: Format | None,
        bad_rows: BadRows,
        reader_num: int,
    ) -> None:
        """Begins at once."""
        self.bad_rows = bad_rows
        self._rows: RowsInMemory | None = None
        self._error: BaseException | None = None

        def load() -> None:
            try:
                self._rows = load_rows(
                    splits, schema, format=format, bad_rows=bad_rows, reader_num=reader_num
                )
            except BaseException as error:  # raised by who waits
                self._error = error

        self._thread = threading.Thread(target=load, name="preload", daemon=True)
        self._thread.start()

    def wait(self) -> RowsInMemory:
        """Returns the rows, or raises what the loading raised; a reader that is stuck ends it."""
        self._thread.join()
        if self._rows is None:
            raise self._error or DataError("loading ended without rows")
        return self._rows


def _size(rows: int, fleet: HasPeers | None) -> int:
    return rows if fleet is None else fleet.peers().total(rows)[0]
