r"""Reader of Criteo's layout: tab-separated rows, terminated by "\n" or "\r\n", scanned in one pass.

A row is [label] number... value...; the schema gives their numbers, 13 and 26 for Criteo:

    1 \t 5 \t \t -2 \t 68fd1e64 \t \t e5ba7672 \n

The label is 0 or 1; a number is empty (missing) or -?[0-9]+ within int64; a value is any bytes, or empty
(missing), and is hashed with its slot's number. Any other row is malformed: it is reported with the column at
fault and not written. In a malformed row with the right number of columns, that column is a label or number.

Either all rows of a file have a label or none: the majority of the rows at its start decides, and rows of the
other kind are malformed.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import hash_bytes
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import counted
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.text_reader import (
    BadLine,
    LineScanner,
    TextReader,
    first_block,
    shown,
    without_overflows,
)

# The columns of `malformed`, which describe a malformed row.
LINE, START, STOP, COLUMN = range(4)

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = (np.uint8(ord(character)) for character in "\t\n\r-0")


class CriteoScanner:
    """A `LineScanner` of Criteo's layout. Stateless: threads share it."""

    def __init__(self, schema: Schema, *, has_label: bool) -> None:
        self._schema = schema
        self._has_label = has_label
        self._slot_numbers = np.array(schema.slot_numbers, np.int64)

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        num_lines = int(np.count_nonzero(block == ord("\n")))
        num_slots = len(self._schema.slots)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        numbers = np.empty((num_lines, len(self._schema.dense)), np.float64)
        keys = np.empty((num_lines, num_slots), np.uint64)
        malformed = np.empty((num_lines, 4), np.int64)
        num_rows, num_malformed = scan_rows(
            block, self._has_label, self._slot_numbers, starts, labels, numbers, keys, malformed
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
        super().__init__(CriteoScanner(schema, has_label=True), bad_rows)
        self._without_label = CriteoScanner(schema, has_label=False)
        self._num_features = len(schema.dense) + len(schema.slots)

    def scanner_of(self, split: FileSplit, block: NDArray[np.uint8], position: int) -> LineScanner:
        """Decides by majority of the rows in the file's first block; without a valid row, for a label."""
        if position or split.stop is not None:
            block = first_block(split.path)
        return self._scanner if have_label(block, self._num_features) else self._without_label


def have_label(block: NDArray[np.uint8], num_features: int) -> bool:
    """Whether the rows in a block have a label: most of them; without a valid row they have."""
    num_tabs = Counter(line.count(b"\t") for line in block.tobytes().split(b"\n")[:-1])
    return num_tabs[num_features] >= num_tabs[num_features - 1]


@kernel
def field_end(block: NDArray[np.uint8], position: int) -> int:
    """Returns the end of the field that begins at `position`: a tab or a newline."""
    while block[position] != _TAB and block[position] != _NEWLINE:
        position += 1
    return position


@kernel
def line_end(block: NDArray[np.uint8], position: int) -> int:
    """Returns the position of the newline of the line that contains `position`."""
    while block[position] != _NEWLINE:
        position += 1
    return position


@kernel
def parse_number(block: NDArray[np.uint8], start: int, stop: int) -> tuple[float, bool]:
    """Returns the integer in `block[start:stop]`, nan if empty, and whether it is a valid int64."""
    if start == stop:
        return np.nan, True
    is_negative = block[start] == _MINUS
    first_digit = start + 1 if is_negative else start
    # 19 digits are below 2^64: no overflow before the check against int64.
    if not 1 <= stop - first_digit <= 19:
        return np.nan, False
    magnitude = np.uint64(0)
    for position in range(first_digit, stop):
        digit = block[position] - _ZERO  # unsigned: bytes below "0" wrap to far above 9
        if digit > 9:
            return np.nan, False
        magnitude = magnitude * np.uint64(10) + np.uint64(digit)
    if magnitude > np.uint64(2**63 - 1) + np.uint64(is_negative):
        return np.nan, False
    number = np.float64(magnitude)
    return (-number if is_negative else number), True


@kernel
def scan_label(
    block: NDArray[np.uint8], position: int, row: int, labels: NDArray[np.float32]
) -> tuple[bool, int]:
    """Writes the label; returns whether it is valid, and the position after it and its tab."""
    digit = block[position] - _ZERO
    if digit > 1 or block[position + 1] != _TAB:
        return False, position
    labels[row] = np.float32(digit)
    return True, position + 2


@kernel
def scan_numbers(
    block: NDArray[np.uint8], position: int, row: int, numbers: NDArray[np.float64]
) -> tuple[int, int]:
    """Writes a row of `numbers`; returns how many are valid, and the position after them."""
    num_dense = numbers.shape[1]
    for index in range(num_dense):
        stop = field_end(block, position)
        number, is_valid = parse_number(block, position, stop)
        if not is_valid or block[stop] != _TAB:
            return index, position
        numbers[row, index] = number
        position = stop + 1
    return num_dense, position


@kernel
def scan_values(
    block: NDArray[np.uint8],
    position: int,
    row: int,
    slot_numbers: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> tuple[int, int]:
    """Writes a row of `keys`; returns how many are valid, and the position after them."""
    num_slots = keys.shape[1]
    for slot in range(num_slots):
        end = field_end(block, position)
        is_last = slot == num_slots - 1
        if (block[end] == _NEWLINE) != is_last:
            return slot, position
        stop = end - 1 if is_last and end > position and block[end - 1] == _RETURN else end
        keys[row, slot] = hash_bytes(block, position, stop, slot_numbers[slot])
        position = end + 1
    return num_slots, position


@kernel
def scan_row(
    block: NDArray[np.uint8],
    position: int,
    has_label: bool,
    row: int,
    slot_numbers: NDArray[np.int64],
    labels: NDArray[np.float32],
    numbers: NDArray[np.float64],
    keys: NDArray[np.uint64],
) -> tuple[int, int]:
    """Writes a row of the columns, partially if it is malformed.

    Returns 0 and the start of the next line, or the column at fault, from 1, and its start.
    """
    num_labels = 0
    if has_label:
        is_valid, position = scan_label(block, position, row, labels)
        if not is_valid:
            return 1, position
        num_labels = 1
    num_dense = numbers.shape[1]
    num_valid, position = scan_numbers(block, position, row, numbers)
    if num_valid < num_dense:
        return num_labels + num_valid + 1, position
    num_valid, position = scan_values(block, position, row, slot_numbers, keys)
    if num_valid < keys.shape[1]:
        return num_labels + num_dense + num_valid + 1, position
    return 0, position


@kernel
def scan_rows(
    block: NDArray[np.uint8],  # uint8[n], whole lines: the last byte is a newline
    has_label: bool,  # whether rows begin with a label; if not, `labels` is not written
    slot_numbers: NDArray[np.int64],  # int64[S], of each slot in the feature hash
    # int64[R], overwritten from the start with the rows' positions in the block
    starts: NDArray[np.int64],
    labels: NDArray[np.float32],  # float32[R], overwritten from the start, as the other columns are
    numbers: NDArray[np.float64],  # float64[R, num_dense], nan where missing
    keys: NDArray[np.uint64],  # uint64[R, S]
    # int64[R, 4], overwritten: LINE, from 0, START and STOP in the block, and the COLUMN at fault,
    # from 1
    malformed: NDArray[np.int64],
) -> tuple[int, int]:
    """Scans the R lines of a block; returns the numbers of rows written and of malformed rows."""
    # not a literal, for which scan_row would be compiled once more
    position = num_rows = int(np.int64(0))
    num_malformed = 0
    while position < len(block):
        start = position
        fault, position = scan_row(
            block, start, has_label, num_rows, slot_numbers, labels, numbers, keys
        )
        if fault == 0:
            starts[num_rows] = start
            num_rows += 1
            continue
        stop = line_end(block, position)
        malformed[num_malformed, LINE] = num_rows + num_malformed
        malformed[num_malformed, START] = start
        malformed[num_malformed, STOP] = stop
        malformed[num_malformed, COLUMN] = fault
        num_malformed += 1
        position = stop + 1
    return num_rows, num_malformed
