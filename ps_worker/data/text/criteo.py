r"""Reader of Criteo's layout: label \t numbers \t values, one row a line.

The schema gives the number of numbers and values, 13 and 26 for Criteo. Either all rows of a file have a
label or none: the majority of the rows at its start decides, and rows of the other kind are malformed.
Values are bytes and are never decoded.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import counted
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.batching import without_rows
from ps_worker.data.blocks.reader import Block
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.text.criteo_scanner import COLUMN, LINE, START, STOP, scan_rows
from ps_worker.data.text.line_blocks import LineNumbers, line_blocks, line_splits
from ps_worker.data.text.text_reader import shown

_MAX_MALFORMED = 64  # malformed rows reported by one call of the scanner


class CriteoReader:
    """A `Reader` of Criteo's layout. Thread-safe."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        """Takes the columns after the label, and a counter of malformed rows."""
        self._schema = schema
        self._bad_rows = bad_rows

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Splits a file by bytes unless it is compressed; see `Reader.splits`."""
        return line_splits(path, num_splits)

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split; offsets are in bytes of the content. See `Reader.blocks`."""
        scan: _Scan | None = None
        for text, position in line_blocks(split, offset):
            if scan is None:
                is_start = position == 0 and split.stop is None
                has_label = self._has_label(text if is_start else _first_block(split.path))
                lines = LineNumbers(split.path, position)
                scan = _Scan(self._schema, self._bad_rows, split.path, has_label, lines)
            rows, starts = scan.rows_of(text, position)
            if rows.size:
                yield Block(rows, position, position + starts)

    def _has_label(self, text: NDArray[np.uint8]) -> bool:
        """Decides by majority of the rows in a file's first block; without a valid row, returns True."""
        num_features = len(self._schema.dense) + len(self._schema.slots)
        num_tabs = Counter(line.count(b"\t") for line in text.tobytes().split(b"\n")[:-1])
        return num_tabs[num_features] >= num_tabs[num_features - 1]


def _first_block(path: str) -> NDArray[np.uint8]:
    """Returns the block that decides about labels for every split of a file."""
    with closing(line_blocks(FileSplit(path))) as blocks:
        return next(blocks)[0]


class _Scan:
    """One pass over a split. For one thread."""

    def __init__(
        self, schema: Schema, bad_rows: BadRows, path: str, has_label: bool, lines: LineNumbers
    ) -> None:
        self._schema = schema
        self._bad_rows = bad_rows
        self._path = path
        self._has_label = has_label
        self._lines = lines
        self._slot_numbers = np.array(schema.slot_numbers, np.int64)
        self._malformed = np.empty((_MAX_MALFORMED, 4), np.int64)
        # Reused: every slot has one key, so blocks share offsets, and numbers are scaled at once.
        self._offsets = np.zeros(1, np.int32)
        self._numbers = np.empty((0, len(schema.dense)), np.float64)

    def rows_of(self, text: NDArray[np.uint8], position: int) -> tuple[Batch, NDArray[np.int64]]:
        """Returns the rows, possibly none, of a block of lines at `position`, and their starts in it."""
        num_lines = int(np.count_nonzero(text == ord("\n")))
        self._make_room(num_lines)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        keys = np.empty((num_lines, len(self._schema.slots)), np.uint64)
        size = start = 0
        while start < len(text):
            start, num_rows, num_malformed = scan_rows(
                text,
                start,
                self._has_label,
                self._slot_numbers,
                starts[size:],
                labels[size:],
                self._numbers[size:],
                keys[size:],
                self._malformed,
            )
            size += num_rows
            for row in self._malformed[:num_malformed]:
                self._count_malformed(text[row[START] : row[STOP]].tobytes(), row, position)
            self._lines.passed += num_rows + num_malformed
        num_slots = len(self._schema.slots)
        rows = Batch(
            labels=labels[:size] if self._has_label else None,
            dense=self._schema.scale_dense(self._numbers[:size]),
            keys=keys[:size].reshape(-1),
            offsets=self._offsets[: size * num_slots + 1],
            num_slots=num_slots,
        )
        if faults := self._schema.overflows(self._numbers[:size], rows.dense):
            for row, fault in faults.items():
                before = int(np.count_nonzero(text[starts[row] :] == ord("\n")))
                self._bad_rows.add(
                    self._path, self._place(-before, int(position + starts[row])), fault
                )
            return without_rows(rows, starts[:size], faults)
        return rows, starts[:size]

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._numbers):
            num_slots = len(self._schema.slots)
            self._offsets = np.arange(num_rows * num_slots + 1, dtype=np.int32)
            self._numbers = np.empty((num_rows, len(self._schema.dense)), np.float64)

    def _count_malformed(self, text: bytes, row: NDArray[np.int64], position: int) -> None:
        """Counts the malformed row `text`, described by `row` of the scanner."""
        place = self._place(int(row[LINE]), int(position + row[START]))
        self._bad_rows.add(self._path, place, self._fault(text, int(row[COLUMN])))

    def _place(self, line: int, offset: int) -> str:
        """Returns the place of a line, counted from those passed, for a message."""
        # Its number may take a pass over the file up to there, its offset is known.
        return str(self._lines.number(line)) if self._bad_rows.is_shown else f"byte {offset}"

    def _fault(self, text: bytes, column: int) -> str:
        """Returns the fault of a malformed row for a message."""
        fields = text.split(b"\t")
        expected = len(self._schema.dense) + len(self._schema.slots) + self._has_label
        if len(fields) != expected:
            kind = "with" if self._has_label else "without"
            return f"{counted(len(fields), 'column')}, expected {expected} ({kind} a label): {shown(text)}"
        field = shown(fields[column - 1])
        if self._has_label and column == 1:
            return f"the label is {field}, expected 0 or 1"
        name = self._schema.dense[column - 1 - self._has_label].name
        return f"column {column} ({name}) is {field}, expected a 64-bit integer or nothing"
