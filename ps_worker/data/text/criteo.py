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

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import counted
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.criteo_scanner import COLUMN, LINE, START, STOP, scan_rows
from ctr_ps.ps_worker.data.text.line_blocks import line_blocks
from ctr_ps.ps_worker.data.text.text_reader import (
    BadLine,
    LineScanner,
    TextReader,
    shown,
    without_overflows,
)


class CriteoScanner:
    """A `LineScanner` of Criteo's layout. Stateless: threads share it."""

    def __init__(self, schema: Schema, *, has_label: bool) -> None:
        """Takes the columns after the label, and whether rows begin with one."""
        self._schema = schema
        self._has_label = has_label
        self._slot_numbers = np.array(schema.slot_numbers, np.int64)

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        """Scans a block of whole lines; see `LineScanner.scan`."""
        num_lines = int(np.count_nonzero(block == ord("\n")))
        num_slots = len(self._schema.slots)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        numbers = np.empty((num_lines, len(self._schema.dense)), np.float64)
        keys = np.empty((num_lines, num_slots), np.uint64)
        malformed = np.empty((num_lines, 4), np.int64)
        _, num_rows, num_malformed = scan_rows(
            block, 0, self._has_label, self._slot_numbers, starts, labels, numbers, keys, malformed
        )
        rows = Batch(
            labels=labels[:num_rows] if self._has_label else None,
            dense=self._schema.scale_dense(numbers[:num_rows]),
            keys=keys[:num_rows].reshape(-1),
            offsets=np.arange(num_rows * num_slots + 1, dtype=np.int32),
            num_slots=num_slots,
        )
        bad_lines = [
            BadLine(int(row[LINE]), int(row[START]), self._fault(block, row))
            for row in malformed[:num_malformed]
        ]
        return without_overflows(
            self._schema, numbers[:num_rows], rows, starts[:num_rows], bad_lines
        )

    def _fault(self, block: NDArray[np.uint8], row: NDArray[np.int64]) -> str:
        """Returns the fault of a malformed row for a message."""
        text, column = block[row[START] : row[STOP]].tobytes(), int(row[COLUMN])
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


class CriteoReader(TextReader):
    """Reads files in Criteo's layout, plain or compressed."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        """Takes the columns after the label, and a counter of malformed rows."""
        super().__init__(CriteoScanner(schema, has_label=True), bad_rows)
        self._without_label = CriteoScanner(schema, has_label=False)
        self._num_features = len(schema.dense) + len(schema.slots)

    def scanner_of(self, split: FileSplit, block: NDArray[np.uint8], position: int) -> LineScanner:
        """Decides by majority of the rows in the file's first block; without a valid row, for a label."""
        if position or split.stop is not None:
            with closing(line_blocks(FileSplit(split.path))) as blocks:
                block, _ = next(blocks)
        num_tabs = Counter(line.count(b"\t") for line in block.tobytes().split(b"\n")[:-1])
        has_label = num_tabs[self._num_features] >= num_tabs[self._num_features - 1]
        return self._scanner if has_label else self._without_label
