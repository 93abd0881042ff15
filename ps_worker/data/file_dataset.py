"""Base class of datasets of files: the list of files, and their format."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError, DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRowLog, BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import stamp_of
from ctr_ps.ps_worker.data.formats import Format, require_format, values_of_files
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.reading import Reading
from ctr_ps.ps_worker.data.slot_values import SlotValues

if TYPE_CHECKING:
    from ctr_ps.ps_worker.data.text.multislot import Values
    from ctr_ps.ps_worker.data.user_code.data_generator import MultiSlotDataGenerator


class FileDataset:
    """Files with a schema and a format; subclasses turn their rows into batches."""

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
        negatives: NegativeSampling | None = None,
    ) -> None:
        """Makes a dataset without files.

        Args:
            schema: The columns of the files.
            batch_size: B, at least 1.
            thread_num: Training threads, at least 1.
            format: Name of a format in docs/data.md, or a factory of readers; None: by a file's suffix.
            bad_row_limit: Malformed rows allowed in a pass over the files.
            reader_num: Reader threads, each with a file or split of its own.
            seed: Seed of shuffles of files or rows; for a global shuffle the same on all workers.
            negatives: Sampling of rows without a click; None: all are kept.

        Raises:
            UsageError: If a number is too small, or the format is unknown.
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
        self.schema = schema  # the columns of the files
        self.batch_size = batch_size  # B
        self.thread_num = thread_num  # training threads that share its batches
        self._format = format
        self._format_shown = format if isinstance(format, str) else _name_of(format)
        self._bad_row_limit = bad_row_limit
        self._reader_num = reader_num
        self._seed = seed
        self._negatives = negatives
        self._splits: list[FileSplit] | None = None
        self._slot_values: SlotValues | None = None
        self._bad_row_log = BadRowLog()

    def set_filelist(self, files: Sequence[str | Path | FileSplit]) -> None:
        """Sets the files or splits to read, in order: a worker's own, as `fleet.split_files` returns them.

        Reading refuses a file that has changed since.
        """
        if isinstance(files, str):
            raise UsageError(f"files is {files!r}, expected a list of paths")
        self._splits = [
            _stamped(file if isinstance(file, FileSplit) else FileSplit(str(file)))
            for file in files
        ]
        self._bad_row_log = BadRowLog()
        self._slot_values = None

    def set_pipe_command(
        self, command: str, *, columns: Sequence[str] | None = None, values: "Values" = "keys"
    ) -> None:
        """Reads each file through a command that prints multi-slot text; replaces the format.

        `command` is for bash, run once per file with the content as stdin. `columns` are the order of the
        columns in its output; None: "dense_input", the slots, "click". `values` tells whether it prints keys
        for slots, or text to be hashed. Raises UsageError if the command is empty, or the columns do not
        match the schema.
        """
        from ctr_ps.ps_worker.data.user_code.pipe import piped

        make_reader = piped(command, columns=columns, values=values)
        make_reader(self.schema, BadRows())  # checks the arguments
        self._format = make_reader
        self._format_shown = f"{command} | {columns and list(columns)} {values}"
        self._slot_values = None

    def set_generator(self, generator: "MultiSlotDataGenerator") -> None:
        """Parses the lines of the files with a generator, in this process; replaces the format.

        Raises DataError if the generator uses `hash()`, whose values differ in each process.
        """
        from ctr_ps.ps_worker.data.user_code.generator_reader import generated

        self._format = generated(generator)
        self._format_shown = type(generator).__qualname__
        self._slot_values = None

    @property
    def terms(self) -> dict[str, str]:
        """Settings of reading that workers of a job must share."""
        settings = {
            "kind": type(self).__name__,
            "schema": self.schema.fingerprint,
            "batch_size": self.batch_size,
            "thread_num": self.thread_num,
            "reader_num": self._reader_num,
            "bad_row_limit": self._bad_row_limit,
            "format": self._format_shown,
            "seed": self._seed,
            "negatives": self._negatives,
        }
        return {f"dataset.{name}": str(value) for name, value in settings.items()}

    @property
    def slot_values(self) -> SlotValues | None:
        """Kinds of slot values, of a generator as far as they were read; None: no files were set."""
        if self._slot_values is None and self._splits is not None:
            files = [split.path for split in self._splits]
            self._slot_values = values_of_files(files, self.schema, self._format)
        return self._slot_values

    def head(self) -> Iterator[Batch]:
        """Yields the first rows, in batches of any size, without counting as a pass or sampling negatives.

        Malformed rows are not reported; too many for a pass end it. Raises UsageError if no files were set.
        """
        return _rows_within_limit(self._silent_reading())

    def require_rows(self) -> None:
        """Reads the first rows, and raises what a pass without rows would; it does not count as a pass."""
        reading = self._silent_reading()
        with closing(reading.blocks()) as blocks:
            if next(blocks, None) is None:
                reading.end(rows=0)

    def _silent_reading(self) -> Reading:
        bad_rows = BadRows(self._bad_row_limit, BadRowLog(is_silent=True))
        return Reading(self._files(), self.schema, self._format, bad_rows)

    @property
    def num_files(self) -> int | None:
        """Number of files and splits; None: none were set."""
        return None if self._splits is None else len(self._splits)

    def _files(self) -> list[FileSplit]:
        if self._splits is None:
            raise UsageError("the dataset has no files: call dataset.set_filelist(files) first")
        return self._splits


def _name_of(format: Format | None) -> str:
    return "" if format is None else getattr(format, "__qualname__", type(format).__qualname__)


def _stamped(split: FileSplit) -> FileSplit:
    if split.stamp is not None:
        return split
    with suppress(DataError):
        return replace(split, stamp=stamp_of(split.path))
    return split


def _rows_within_limit(reading: Reading) -> Iterator[Batch]:
    with suppress(BadRowError):  # the pass will say it
        for _, block in reading.blocks():
            yield block.rows


def head_of(data: Iterable[object]) -> Iterator[Batch]:
    """Returns the first rows of files, or of a list of batches; none of other, unrepeatable data."""
    if isinstance(data, FileDataset):
        return data.head()
    in_memory = data if isinstance(data, Sequence) else ()
    return (each for each in in_memory if isinstance(each, Batch))
