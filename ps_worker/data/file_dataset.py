"""What datasets of files have in common: their files, and how these are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctr_model.schema import Schema
from protos.errors import UsageError
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.formats import Format, require_format

if TYPE_CHECKING:
    from ps_worker.data.text.multislot import Values
    from ps_worker.data.user_code.data_generator import MultiSlotDataGenerator


class FileDataset:
    """A dataset that knows what to read; how its rows become batches, each kind of dataset says.

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
        seed: int = 0,
    ) -> None:
        """Has no files yet.

        Args:
            schema: The columns of the files.
            batch_size: B, at least 1.
            thread_num: Training threads, at least 1.
            format: Of the files, as docs/data.md lists them, or what makes a reader of one's own; None: the
                end of a file's name tells.
            bad_row_limit: Malformed rows that a pass over the files skips before it stops.
            reader_num: Threads that read, a file or split each.
            seed: Of the order of files or rows.

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
        self._seed = seed
        self._splits: list[FileSplit] | None = None

    def set_filelist(self, files: Sequence[str | Path | FileSplit]) -> None:
        """Sets what to read, in this order: of a worker, its share as `fleet.split_files` returns it."""
        if isinstance(files, str):
            raise UsageError(f"files is {files!r}, expected a list of paths")
        self._splits = [
            file if isinstance(file, FileSplit) else FileSplit(str(file)) for file in files
        ]

    def set_pipe_command(
        self, command: str, *, columns: Sequence[str] | None = None, values: "Values" = "keys"
    ) -> None:
        """Has a command read each file from stdin and print multi-slot text, in place of a format.

        Args:
            command: For bash; a process runs for every file that is being read.
            columns: Their order in what it prints; None: "dense_input", the slots, "click".
            values: What it prints for slots: keys, or text that is hashed.

        Raises:
            UsageError: If the command is empty, or the columns are not the schema's.
        """
        from ps_worker.data.text.multislot import MultiSlotScanner
        from ps_worker.data.user_code.pipe import PipeReader, piped

        PipeReader(command, MultiSlotScanner(self.schema, columns, values))  # refuses what is wrong
        self._format = piped(command, columns=columns, values=values)

    def set_generator(self, generator: "MultiSlotDataGenerator") -> None:
        """Has a generator parse the lines of the files, in this process, in place of a format."""
        from ps_worker.data.user_code.generator_reader import generated

        self._format = generated(generator)

    def _files(self) -> list[FileSplit]:
        if self._splits is None:
            raise UsageError("the dataset has no files: call dataset.set_filelist(files) first")
        return self._splits
