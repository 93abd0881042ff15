"""Streaming dataset: files are read while they are trained on.

one reader: in order    splits --Reader--> blocks --batching--> batches, with positions
several: in any order   splits --> reader threads, a split each --> bounded queue --> batches
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import DataPosition, batches, digest_of_files
from ctr_ps.ps_worker.data.file_dataset import FileDataset
from ctr_ps.ps_worker.data.files.content import is_compressed
from ctr_ps.ps_worker.data.files.file_split import FileSplit, shuffled
from ctr_ps.ps_worker.data.files.listing import size_of
from ctr_ps.ps_worker.data.formats import Format, has_byte_offsets
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.reading import Reading, merged

LARGEST_STEP = 0.1
"""Largest share of a file that counts as a whole; with a larger one the share is unknown."""

_QUEUED_BATCHES = 4  # per reader, waiting for training


class QueueDataset(FileDataset):
    """Batches of files; each iteration is the next epoch, a pass over all files."""

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
        negatives: NegativeSampling | None = None,
    ) -> None:
        """Makes a dataset without files; other arguments and errors are those of `FileDataset`.

        `shuffle_files` shuffles the order of files in each epoch, by `seed`. With one reader the iterating
        thread reads, and batches follow the order of the files; with more the order is undefined.
        """
        super().__init__(
            schema,
            batch_size,
            thread_num,
            format=format,
            bad_row_limit=bad_row_limit,
            reader_num=reader_num,
            seed=seed,
            negatives=negatives,
        )
        # whether batches have a defined order, and so positions
        self.has_order = reader_num == 1
        self._shuffle_files = shuffle_files
        self._epoch = 0
        self._reading: Reading | None = None  # of the last iteration
        self._size_of = cache(size_of)  # asked once: of a URL it may be a request

    @property
    def terms(self) -> dict[str, str]:
        """See `FileDataset`."""
        return {**super().terms, "dataset.shuffle_files": str(self._shuffle_files)}

    @property
    def rows(self) -> int:
        """Rows yielded so far by the last iteration."""
        return 0 if self._reading is None else self._reading.rows

    @property
    def bad_rows(self) -> int:
        """Malformed rows skipped so far by the last iteration."""
        return 0 if self._reading is None else self._reading.bad_rows.total

    def __iter__(self) -> Generator[Batch, None, None]:
        """Reads the next epoch; closing or dropping the iterator ends the reader threads.

        Raises UsageError if no files were set; while iterating, DataError without rows, and as
        `Reader.blocks`.
        """
        return (batch for batch, _ in self._begin(self._next_epoch()))

    def skip_to(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, counted from 1."""
        self._epoch = epoch - 1

    def positioned(self, start: DataPosition | None = None) -> Iterator[tuple[Batch, DataPosition]]:
        """Yields the batches of the next epoch, or of the rest of one, each with the position after it.

        `start` is a position of a dataset with the same files and settings; None: the start of the next
        epoch. Raises as an iteration; also UsageError if there is more than one reader, or `start` has other
        files or another seed, and DataError if it is beyond the end of these files.
        """
        if not self.has_order:
            raise UsageError(
                f"reader_num is {self._reader_num}, expected 1: batches of several readers have no order, "
                "and so no positions"
            )
        first = self._next_epoch()
        start = start or first
        if start.seed != first.seed:
            raise UsageError(
                f"the position has seed {start.seed}, but the dataset has {first.seed}, so its files are in "
                "another order"
            )
        if start.files != first.files:
            raise UsageError(
                f"the position does not fit this dataset of {counted(len(self._files()), 'file')}: it was "
                "taken with other files, another order of files or another shuffle_files"
            )
        return self._begin(start)

    def shares(self, epoch: int) -> "PassShare":
        """Returns the progress of positions in an epoch, counted from 1."""
        return PassShare(
            self._order(epoch),
            has_byte_offsets=lambda path: has_byte_offsets(path, self._format),
            size_of=self._size_of,
        )

    def _order(self, epoch: int) -> list[FileSplit]:
        splits = self._files()
        return shuffled(splits, self._seed, epoch) if self._shuffle_files else splits

    def _next_epoch(self) -> DataPosition:
        files = digest_of_files(self._files(), self._shuffle_files)
        return DataPosition(epoch=self._epoch + 1, seed=self._seed, files=files)

    def reading_of(self, epoch: int, start: DataPosition | None = None) -> Reading:
        """Returns the files of an epoch in its order, to be read from `start`, by default all of them."""
        self._reading = Reading(
            self._order(epoch),
            self.schema,
            self._format,
            BadRows(self._bad_row_limit, self._bad_row_log),
            start=start,
            negatives=self._negatives,
        )
        self._epoch = epoch
        return self._reading

    def _begin(self, start: DataPosition) -> Iterator[tuple[Batch, DataPosition]]:
        reading = self.reading_of(start.epoch, start)
        if self.has_order:
            return self._counted(reading, batches(reading.blocks(), self.batch_size, start))
        readers = [
            batches(reading.blocks(), self.batch_size, start)
            for _ in range(min(self._reader_num, reading.num_splits))
        ]
        merged_batches = merged(readers, capacity=_QUEUED_BATCHES * self._reader_num)
        return self._counted(reading, merged_batches)

    @staticmethod
    def _counted(
        reading: Reading, found: Iterator[tuple[Batch, DataPosition]]
    ) -> Iterator[tuple[Batch, DataPosition]]:
        for batch, position in found:
            reading.rows += batch.size
            yield batch, position
        reading.end(reading.rows)


class PassShare:
    """The share of a pass over files that is read, by their sizes on disk.

    Within a file it follows byte offsets, which only uncompressed text has. Other files count once they are
    read completely; if such a file is much of the pass, the share is unknown.
    """

    def __init__(
        self,
        splits: Sequence[FileSplit],  # in the order of the pass
        *,
        # whether offsets in a file, and its splits, are in bytes of its content
        has_byte_offsets: Callable[[str], bool],
        size_of: Callable[[str], int] = size_of,  # returns the bytes of a file
    ) -> None:
        self._splits = splits
        self._is_smooth = [
            has_byte_offsets(split.path) and not is_compressed(split.path) for split in splits
        ]
        try:
            sizes = [size_of(split.path) for split in splits]
        except DataError:  # reading reports it
            sizes = []
        self._sizes = [
            (size if split.stop is None else split.stop) - split.start if is_smooth else size
            for split, size, is_smooth in zip(splits, sizes, self._is_smooth, strict=False)
        ]
        total = sum(self._sizes)
        pairs = zip(self._sizes, self._is_smooth, strict=False)
        steps = [size for size, is_smooth in pairs if not is_smooth]
        self._total = total if max(steps, default=0) <= LARGEST_STEP * total else 0

    def at(self, split: int, offset: int | None) -> float | None:
        """Returns the share, from 0 to 1, before a position; None: unknown. See `DataPosition`."""
        if not self._total:
            return None
        done = sum(self._sizes[:split])
        if offset is not None and split < len(self._splits) and self._is_smooth[split]:
            done += min(max(offset - self._splits[split].start, 0), self._sizes[split])
        return done / self._total
