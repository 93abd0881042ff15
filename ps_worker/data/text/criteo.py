r"""Reader of Criteo's layout: label \t numbers \t values, one row a line.

The schema gives the number of numbers and values, 13 and 26 for Criteo. Either all rows of a file have a
label or none: the majority of the rows at its start decides, and rows of the other kind are malformed.
Values are bytes and are never decoded.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.schema import Schema
from protos.errors import counted
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.text.criteo_scanner import COLUMN, LINE, START, STOP, scan_rows
from ps_worker.data.text.line_blocks import line_blocks
from ps_worker.data.text.text_reader import (
    BadLine,
    LineScanner,
    TextReader,
    shown,
    without_overflows,
)

_MAX_MALFORMED = 64  # malformed rows reported by one call of the scanner


class CriteoReader(TextReader):
    """Reads files of Criteo's layout, plain or compressed. Thread-safe."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        super().__init__(CriteoScanner(schema, has_label=True), bad_rows)
        self._schema = schema

    def _scanner_of(self, split: FileSplit, block: NDArray[np.uint8], position: int) -> LineScanner:
        is_start = position == 0 and split.stop is None
        first = block if is_start else _first_block(split.path)
        return CriteoScanner(self._schema, has_label=self._has_label(first))

    def _has_label(self, text: NDArray[np.uint8]) -> bool:
        """Whether most rows of a file's first block have a label; True without a valid row."""
        num_features = len(self._schema.dense) + len(self._schema.slots)
        num_tabs = Counter(line.count(b"\t") for line in text.tobytes().split(b"\n")[:-1])
        return num_tabs[num_features] >= num_tabs[num_features - 1]


def _first_block(path: str) -> NDArray[np.uint8]:
    with closing(line_blocks(FileSplit(path))) as blocks:
        return next(blocks)[0]


class CriteoScanner:
    """A `LineScanner` of Criteo's layout, for one pass over a split."""

    def __init__(self, schema: Schema, *, has_label: bool) -> None:
        self._schema = schema
        self._has_label = has_label
        self._slot_numbers = np.array(schema.slot_numbers, np.int64)
        self._malformed = np.empty((_MAX_MALFORMED, 4), np.int64)
        # Reused: every slot has one key, so blocks share offsets, and numbers are scaled at once.
        self._offsets = np.zeros(1, np.int32)
        self._numbers = np.empty((0, len(schema.dense)), np.float64)

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        num_lines = int(np.count_nonzero(block == ord("\n")))
        self._make_room(num_lines)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        keys = np.empty((num_lines, len(self._schema.slots)), np.uint64)
        bad_lines: list[BadLine] = []
        size = start = 0
        while start < len(block):
            first_line = size + len(bad_lines)
            start, num_rows, num_malformed = scan_rows(
                block,
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
            for entry in self._malformed[:num_malformed]:
                fault = self._fault(block[entry[START] : entry[STOP]].tobytes(), int(entry[COLUMN]))
                bad_lines.append(BadLine(first_line + int(entry[LINE]), int(entry[START]), fault))
        num_slots = len(self._schema.slots)
        rows = Batch(
            labels=labels[:size] if self._has_label else None,
            dense=self._schema.scale_dense(self._numbers[:size]),
            keys=keys[:size].reshape(-1),
            offsets=self._offsets[: size * num_slots + 1],
            num_slots=num_slots,
        )
        return without_overflows(self._schema, self._numbers[:size], rows, starts[:size], bad_lines)

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._numbers):
            num_slots = len(self._schema.slots)
            self._offsets = np.arange(num_rows * num_slots + 1, dtype=np.int32)
            self._numbers = np.empty((num_rows, len(self._schema.dense)), np.float64)

    def _fault(self, text: bytes, column: int) -> str:
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
