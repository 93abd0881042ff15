"""A dataset that is never whole in memory: files are read while they are trained on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import UsageError
from ps_worker.data.criteo import CriteoReader


class QueueDataset:
    """Files of click logs in Criteo's layout, as batches; each iteration reads them from the start.

    Attributes:
        schema: The columns behind the label.
        batch_size: B.
        thread_num: Training threads that share its batches.
    """

    def __init__(
        self, schema: Schema, batch_size: int, thread_num: int = 1, *, bad_row_limit: int = 0
    ) -> None:
        """Has no files yet.

        Args:
            schema: The columns behind the label.
            batch_size: B, at least 1.
            thread_num: Training threads, at least 1.
            bad_row_limit: Malformed rows that an iteration skips before it stops.

        Raises:
            UsageError: If a number is too small.
        """
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("thread_num", thread_num, 1),
            ("bad_row_limit", bad_row_limit, 0),
        ):
            if value < least:
                raise UsageError(f"{name} is {value!r}, expected at least {least}")
        self.schema = schema
        self.batch_size = batch_size
        self.thread_num = thread_num
        self._bad_row_limit = bad_row_limit
        self._files: list[Path] | None = None

    def set_filelist(self, files: Sequence[str | Path]) -> None:
        """Sets what to read, in this order: of a worker, its share as `fleet.split_files` returns it."""
        if isinstance(files, str):
            raise UsageError(f"files is {files!r}, expected a list of paths")
        self._files = [Path(file) for file in files]

    def __iter__(self) -> Iterator[Batch]:
        """Reads; errors are those of `CriteoReader.batches`.

        Raises:
            UsageError: If no files were set.
        """
        if self._files is None:
            raise UsageError("the dataset has no files: call dataset.set_filelist(files) first")
        reader = CriteoReader(
            self.schema, batch_size=self.batch_size, bad_row_limit=self._bad_row_limit
        )
        return reader.batches(self._files)
