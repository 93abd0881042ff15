r"""Readers of libsvm and libffm, sparse text formats, scanned in one pass over the bytes.

    libsvm    label index:value ...             +1 3:0.5 17:1 204:1 \n
    libffm    label field:index:value ...       1 0:0:0.5 1:u7:1 2:a3:1 2:b9:1 \n

Labels are the numbers 1, 0 and -1, which is 0, too; every row has one. Words come in any order; one that
begins with # begins a comment, up to the end of the line. A malformed line is reported with the word at fault
and not written. Blanks, and the use of & and | in conditions, are as in `multislot_scanner`.

libsvm: the name of a dense column is its index; every other index is a value of the only slot. Its number
must be 1, and the text of the index is hashed. An omitted number is 0; the slot may be empty.

libffm: fields are numbered from 0, dense columns first, then slots, in the order of the schema. For a dense
column the index is ignored. For a slot the number must be 1, and the index, any text, is hashed; a field may
be repeated. Omitted numbers are missing; an omitted slot has the empty value.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import hash_bytes
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.text.criteo import line_end
from ctr_ps.ps_worker.data.text.decimals import MAX_KEY_DIGITS, parse_decimal, parse_key
from ctr_ps.ps_worker.data.text.multislot_scanner import (
    count_lines_and_blanks,
    skip_blanks,
    word_end,
)
from ctr_ps.ps_worker.data.text.text_reader import BadLine, TextReader, shown, without_overflows

# The columns of `malformed`, which describe a malformed line: its number from 0, its start, and the position
# of the word at fault.
LINE, START, POSITION = range(3)

_NEWLINE, _COLON, _HASH = (np.uint8(ord(character)) for character in "\n:#")

_NO_FIELD = -1
_MAX_INDEX = 2**64 - 1


class Layout(NamedTuple):
    """What `scan_lines` knows of a format and its columns."""

    has_fields: bool  # whether it is libffm, where a slot without values gets the empty value
    # uint64[num_dense + 1], for libsvm: indexes of dense columns, ascending, and 2^64 - 1
    dense_indexes: NDArray[np.uint64]
    # int64[num_dense + 1]: the dense column of each, and num_dense
    dense_columns: NDArray[np.int64]
    slot_numbers: NDArray[np.int64]  # int64[S], of each slot in the feature hash


class Rows(NamedTuple):
    """Columns that `scan_lines` overwrites, from the start; as many rows as lines have room."""

    starts: NDArray[np.int64]  # int64[lines], positions in the block
    labels: NDArray[np.float32]  # float32[lines]
    dense: NDArray[np.float64]  # float64[lines, num_dense], nan where missing
    keys: NDArray[np.uint64]  # uint64[blanks + lines * S]
    offsets: NDArray[np.int32]  # int32[lines * S + 1], the first is 0
    # of one row: the number of values of each slot, int64[S], and slot, start and stop of each value in the
    # order of the line, int64[blanks, 3]
    counts: NDArray[np.int64]
    found: NDArray[np.int64]


class SvmScanner:
    """A `LineScanner` of libsvm or libffm. Stateless: threads share it."""

    def __init__(self, schema: Schema, *, has_fields: bool) -> None:
        """Takes the columns; a UsageError names one that libsvm does not support."""
        names = [column.name for column in schema.dense]
        indexes = list(range(len(names))) if has_fields else _dense_indexes(schema)
        order = sorted(range(len(names)), key=indexes.__getitem__)
        self._schema = schema
        self._dense = dict(zip(indexes, names, strict=True))
        self._layout = Layout(
            has_fields,
            np.array([*sorted(indexes), 2**64 - 1], np.uint64),
            np.array([*order, len(names)], np.int64),
            np.array(schema.slot_numbers, np.int64),
        )

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        num_lines, num_blanks = count_lines_and_blanks(block)
        num_slots = len(self._schema.slots)
        out = Rows(
            starts=np.empty(num_lines, np.int64),
            labels=np.empty(num_lines, np.float32),
            dense=np.empty((num_lines, len(self._schema.dense)), np.float64),
            keys=np.empty(num_blanks + num_lines * num_slots, np.uint64),
            offsets=np.zeros(num_lines * num_slots + 1, np.int32),
            counts=np.empty(num_slots, np.int64),
            found=np.empty((num_blanks, 3), np.int64),
        )
        malformed = np.empty((num_lines, 3), np.int64)
        num_rows, num_malformed = scan_lines(block, self._layout, out, malformed)
        dense, offsets = out.dense[:num_rows], out.offsets[: num_rows * num_slots + 1]
        if not self._layout.has_fields:
            np.nan_to_num(dense, copy=False)
        rows = Batch(
            labels=out.labels[:num_rows],
            dense=self._schema.scale_dense(dense),
            # Copied, because the buffer is much larger than the keys.
            keys=out.keys[: offsets[-1]].copy(),
            offsets=offsets,
            num_slots=num_slots,
        )
        bad_lines = [
            BadLine(line, start, self._fault(block, start, position))
            for line, start, position in malformed[:num_malformed].tolist()
        ]
        return without_overflows(self._schema, dense, rows, out.starts[:num_rows], bad_lines)

    def _fault(self, block: NDArray[np.uint8], start: int, position: int) -> str:
        """Returns the fault of the word at `position` in the line from `start`."""
        word = block[position : word_end(block, position)].tobytes()
        if position == skip_blanks(block, start):
            return f"the label is {shown(word)}, expected 0, 1 or -1"
        has_fields = self._layout.has_fields
        form = "field:index:number" if has_fields else "index:number"
        pieces = word.split(b":")
        if len(pieces) != form.count(":") + 1 or not (pieces[0].isdigit() and pieces[-2]):
            return f"{shown(word)} does not have the form {form}"
        if len(pieces[0]) > MAX_KEY_DIGITS or int(pieces[0]) > _MAX_INDEX:
            return f"the first number of {shown(word)} is above 2**64 - 1"
        field = int(pieces[0])
        num_fields = len(self._schema.dense) + len(self._schema.slots)
        if has_fields and field >= num_fields:
            return (
                f"the field of {shown(word)} is not in the schema, expected 0 to {num_fields - 1}"
            )
        if field not in self._dense:
            slot = self._schema.slots[field - len(self._dense) if has_fields else 0]
            what = f"a value of slot {slot!r}, which have no weights"
            return f"{shown(word)} is {what}, so its number must be 1"
        name = self._dense[field]
        text = np.frombuffer(word + b"\n", np.uint8)
        number, _ = parse_decimal(text, word.rindex(b":") + 1, len(word))
        return (
            f"the number of {name!r} is {shown(pieces[-1])}, expected a number"
            if math.isnan(number)
            else f"{shown(word)} gives {name!r} a second number"
        )


class LibsvmReader(TextReader):
    """Reads files in the libsvm format."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        """Raises UsageError for several slots, or a dense column whose name is not an index."""
        super().__init__(SvmScanner(schema, has_fields=False), bad_rows)


class LibffmReader(TextReader):
    """Reads files in the libffm format."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        super().__init__(SvmScanner(schema, has_fields=True), bad_rows)


def _dense_indexes(schema: Schema) -> list[int]:
    if len(schema.slots) > 1:
        raise UsageError(
            f"libsvm has no fields, so its schema has one slot, not {len(schema.slots)}: use format libffm, "
            "or one slot for all indexes"
        )
    for column in schema.dense:
        # "07" would never match, because indexes are compared as numbers.
        if not column.name.isdecimal() or str(int(column.name)) != column.name:
            raise UsageError(
                f"dense column {column.name!r}: with libsvm its name must be its index, such as '3'"
            )
        if int(column.name) > _MAX_INDEX:
            raise UsageError(f"dense column {column.name!r}: an index is at most 2**64 - 1")
    return [int(column.name) for column in schema.dense]


@kernel
def parse_label(block: NDArray[np.uint8], start: int, stop: int) -> int:
    """Returns 1 for the number 1, as "+1" and "1.0", 0 for 0 and -1, -1 for anything else."""
    number, _ = parse_decimal(block, start, stop)
    is_label = (number == 0) | (abs(number) == 1)  # not if nan
    return int(np.int64(number > 0)) if is_label else -1


@kernel
def colon_after(block: NDArray[np.uint8], start: int, stop: int) -> int:
    """Returns the position of the first colon in `block[start:stop]`, or `stop`."""
    position = start
    while (position < stop) & (block[position] != _COLON):
        position += 1
    return position


@kernel
def field_of_index(
    index: np.uint64, dense_indexes: NDArray[np.uint64], dense_columns: NDArray[np.int64]
) -> int:
    """Returns the dense column of an index, or the number of dense columns, which is the slot's field."""
    place = np.searchsorted(dense_indexes, index)
    is_dense = dense_indexes[place] == index
    return int(dense_columns[place if is_dense else -1])


@kernel
def scan_word(
    block: NDArray[np.uint8],
    start: int,
    stop: int,
    has_fields: bool,
    dense_indexes: NDArray[np.uint64],
    dense_columns: NDArray[np.int64],
) -> tuple[int, int, int, float]:
    """Parses a word; the last arguments are those of a `Layout`.

    Returns its field, dense columns first, then slots, or _NO_FIELD if it is malformed; start and stop of its
    index; its number.
    """
    key, end = parse_key(block, start)
    is_valid = (end > start) & (block[end] == _COLON)
    # A missing component is an empty one at the end of the word.
    index_start = min(end + 1, stop) if has_fields else start
    index_stop = colon_after(block, index_start, stop) if has_fields else end
    number, _ = parse_decimal(block, min(index_stop + 1, stop), stop)
    is_valid &= (index_stop > index_start) & (not np.isnan(number))
    field = int(np.int64(key)) if has_fields else field_of_index(key, dense_indexes, dense_columns)
    return (field if is_valid else _NO_FIELD), index_start, index_stop, number


@kernel
def scan_features(
    block: NDArray[np.uint8], position: int, layout: Layout, row: int, out: Rows
) -> tuple[int, int]:
    """Writes the numbers of a row, and `counts`, zeros before, and `found`.

    Returns the number of values and the position of the end of the line, or -1 and that of the word at fault.
    """
    dense, counts, found = out.dense, out.counts, out.found
    has_fields, dense_indexes, dense_columns, _ = layout
    num_dense = dense.shape[1]
    num_fields = num_dense + len(counts)
    num_found = 0
    start = skip_blanks(block, position)
    while (block[start] != _NEWLINE) & (block[start] != _HASH):
        stop = word_end(block, start)
        field, index_start, index_stop, number = scan_word(
            block, start, stop, has_fields, dense_indexes, dense_columns
        )
        if (field < 0) | (field >= num_fields):
            return -1, start
        if field < num_dense:
            if not np.isnan(dense[row, field]):
                return -1, start
            dense[row, field] = number
        else:
            if number != 1:
                return -1, start
            slot = field - num_dense
            found[num_found, 0] = slot
            found[num_found, 1] = index_start
            found[num_found, 2] = index_stop
            counts[slot] += 1
            num_found += 1
        start = skip_blanks(block, stop)
    return num_found, line_end(block, start)


@kernel
def put_values(
    block: NDArray[np.uint8], layout: Layout, num_found: int, row: int, out: Rows
) -> None:
    """Writes the keys of a row by slot; the values of a slot keep the order of the line."""
    keys, offsets, counts, found = out.keys, out.offsets, out.counts, out.found
    slot_numbers, num_slots = layout.slot_numbers, len(counts)
    first = row * num_slots
    for slot in range(num_slots):
        start = offsets[first + slot]
        if layout.has_fields and counts[slot] == 0:
            keys[start] = hash_bytes(block, 0, 0, slot_numbers[slot])
            counts[slot] = 1
        offsets[first + slot + 1] = start + counts[slot]
        counts[slot] = 0
    for index in range(num_found):
        slot = found[index, 0]
        place = offsets[first + slot] + counts[slot]
        keys[place] = hash_bytes(block, found[index, 1], found[index, 2], slot_numbers[slot])
        counts[slot] += 1


@kernel
def scan_lines(
    block: NDArray[np.uint8],  # uint8[n], whole lines: the last byte is a newline
    layout: Layout,
    out: Rows,
    malformed: NDArray[np.int64],  # int64[lines, 3]
) -> tuple[int, int]:
    """Scans the lines of a block; returns the numbers of rows written and of malformed lines."""
    num_rows = 0
    num_malformed = 0
    position = 0
    while position < len(block):
        start = position
        word = skip_blanks(block, start)
        position = word_end(block, word)
        label = parse_label(block, word, position)
        num_found = -1
        if label >= 0:
            out.labels[num_rows] = label
            out.dense[num_rows] = np.nan
            out.counts[:] = 0
            num_found, word = scan_features(block, position, layout, num_rows, out)
        if num_found >= 0:
            put_values(block, layout, num_found, num_rows, out)
            out.starts[num_rows] = start
            num_rows += 1
            position = word + 1
            continue
        malformed[num_malformed, LINE] = num_rows + num_malformed
        malformed[num_malformed, START] = start
        malformed[num_malformed, POSITION] = word
        num_malformed += 1
        position = line_end(block, word) + 1
    return num_rows, num_malformed
