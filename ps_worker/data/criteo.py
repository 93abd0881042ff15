r"""Reads click logs in Criteo's layout: label \t numbers \t values, one row a line, plain or gzip.

The schema says how many numbers and values there are: 13 and 26 for Criteo. Rows may come without
a label, but all or none of a run: the first row with a right number of columns decides, and a
later row of the other kind is malformed. Malformed rows are skipped up to a limit, never silently.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import BadRowError
from ps_worker.data.line_blocks import line_blocks
from ps_worker.data.scanner import COLUMN, LINE, START, STOP, scan_rows

logger = logging.getLogger(__name__)

_MAX_LOGGED_ROWS = 5
_MAX_SHOWN_BYTES = 60


class _Columns:
    """The columns of a batch under construction; `filled` of their rows are written."""

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.labels = np.empty(capacity, np.float32)  # [B]
        self.numbers = np.empty((capacity, len(schema.dense)), np.float64)  # [B, num_dense]
        self.keys = np.empty((capacity, len(schema.slots)), np.uint64)  # [B, S]
        self.filled = 0


class CriteoReader:
    """Turns files into batches. For one thread; its batches may go to any.

    Attributes:
        rows: Examples read so far, by all calls of `batches` together.
        bad_rows: Malformed rows so far, likewise.
    """

    def __init__(self, schema: Schema, *, batch_size: int, bad_row_limit: int = 0) -> None:
        """Opens nothing yet.

        Args:
            schema: The columns behind the label.
            batch_size: B, at least 1.
            bad_row_limit: How many malformed rows are skipped; one more is an error.

        Raises:
            ValueError: If `batch_size` or `bad_row_limit` is too small.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size!r}, expected at least 1")
        if bad_row_limit < 0:
            raise ValueError(f"bad_row_limit is {bad_row_limit!r}, expected at least 0")
        self._schema = schema
        self._batch_size = batch_size
        self._bad_row_limit = bad_row_limit
        # Every slot holds one key, so all batches share the offsets.
        self._offsets = np.arange(batch_size * len(schema.slots) + 1, dtype=np.int32)
        self.rows = 0
        self.bad_rows = 0

    def batches(self, files: Sequence[Path]) -> Iterator[Batch]:
        """Yields the rows of `files` in order; batches run on across the files' borders.

        Yields:
            Batches of B examples, the last one of what is left; nothing is written to them later.

        Raises:
            DataError: Names the file that cannot be read or is damaged.
            BadRowError: Names file, line and fault of the malformed row beyond the limit.
        """
        columns = _Columns(self._schema, self._batch_size)
        has_label: bool | None = None
        for path in files:
            line = 1
            for block in line_blocks(path):
                if has_label is None:
                    has_label = self._first_row_has_label(block)
                position = 0
                while position < len(block):
                    position, num_lines = self._scan(
                        path, line, block, position, has_label, columns
                    )
                    line += num_lines
                    if columns.filled == self._batch_size:
                        yield self._batch(columns, has_label)
                        columns = _Columns(self._schema, self._batch_size)
        if columns.filled and has_label is not None:
            yield self._batch(columns, has_label)
        if self.bad_rows:
            logger.warning("malformed rows skipped: bad_rows=%d rows=%d", self.bad_rows, self.rows)

    def _first_row_has_label(self, block: NDArray[np.uint8]) -> bool:
        """Returns what the first row of a right length says; True where there is none."""
        num_features = len(self._schema.dense) + len(self._schema.slots)
        for text in block.tobytes().split(b"\n"):
            num_columns = text.count(b"\t") + 1
            if num_columns in (num_features, num_features + 1):
                return num_columns > num_features
        return True

    def _scan(
        self,
        path: Path,
        line: int,
        block: NDArray[np.uint8],
        start: int,
        has_label: bool,
        columns: _Columns,
    ) -> tuple[int, int]:
        """Adds rows to `columns`; returns where to go on in `block`, and the lines passed."""
        filled = columns.filled
        malformed = np.empty((64, 4), np.int64)
        position, num_rows, num_malformed = scan_rows(
            block,
            start,
            has_label,
            columns.labels[filled:],
            columns.numbers[filled:],
            columns.keys[filled:],
            malformed,
        )
        columns.filled += num_rows
        self.rows += num_rows
        for row in malformed[:num_malformed]:
            text = block[row[START] : row[STOP]].tobytes()
            fault = self._fault(text, int(row[COLUMN]), has_label)
            self._count_malformed(path, line + int(row[LINE]), fault)
        return position, num_rows + num_malformed

    def _count_malformed(self, path: Path, line: int, fault: str) -> None:
        self.bad_rows += 1
        if self.bad_rows > self._bad_row_limit:
            raise BadRowError(
                f"{path}:{line}: {fault}; this is malformed row {self.bad_rows}, "
                f"and bad_row_limit is {self._bad_row_limit}"
            )
        if self.bad_rows <= _MAX_LOGGED_ROWS:
            logger.warning("skipped a malformed row: %s file=%s line=%d", fault, path, line)

    def _fault(self, text: bytes, column: int, has_label: bool) -> str:
        """Returns what is wrong with a malformed row, in words."""
        fields = text.split(b"\t")
        expected = len(self._schema.dense) + len(self._schema.slots) + has_label
        if len(fields) != expected:
            kind = "with" if has_label else "without"
            return f"{len(fields)} columns, expected {expected} ({kind} a label): {_shown(text)}"
        field = _shown(fields[column - 1])
        if has_label and column == 1:
            return f"the label is {field}, expected 0 or 1"
        name = self._schema.dense[column - 1 - has_label].name
        return f"column {column} ({name}) is {field}, expected a 64-bit integer or nothing"

    def _batch(self, columns: _Columns, has_label: bool) -> Batch:
        size, num_slots = columns.filled, len(self._schema.slots)
        return Batch(
            labels=columns.labels[:size] if has_label else None,
            dense=self._schema.scale_dense(columns.numbers[:size]),
            keys=columns.keys[:size].reshape(-1),
            offsets=self._offsets[: size * num_slots + 1],
            num_slots=num_slots,
        )


def _shown(text: bytes) -> str:
    cut = "..." if len(text) > _MAX_SHOWN_BYTES else ""
    return repr(text[:_MAX_SHOWN_BYTES].decode(errors="backslashreplace")) + cut
