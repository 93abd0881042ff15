r"""Readers of libsvm and libffm, sparse text formats.

    libsvm    label index:value ...             +1 3:0.5 17:1 204:1
    libffm    label field:index:value ...       1 0:0:0.5 1:u7:1 2:a3:1 2:b9:1

Labels are the numbers 1, 0 and -1, which is 0, too; every row has one. A word that begins with # begins a
comment, up to the end of the line.

libsvm: the name of a dense column is its index; every other index is a value of the only slot. Its number
must be 1, and the text of the index is hashed. An omitted number is 0; the slot may be empty.

libffm: fields are numbered from 0, dense columns first, then slots, in the order of the schema. For a dense
column the index is ignored. For a slot the number must be 1, and the index, any text, is hashed; a field may
be repeated. Omitted numbers are missing; an omitted slot has the empty value.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.text import svm_scanner as scanner
from ctr_ps.ps_worker.data.text.decimals import MAX_KEY_DIGITS, parse_decimal
from ctr_ps.ps_worker.data.text.multislot_scanner import (
    count_lines_and_blanks,
    skip_blanks,
    word_end,
)
from ctr_ps.ps_worker.data.text.text_reader import BadLine, TextReader, shown, without_overflows

_MAX_INDEX = 2**64 - 1


class SvmScanner:
    """A `LineScanner` of libsvm or libffm. Stateless: threads share it."""

    def __init__(self, schema: Schema, *, has_fields: bool) -> None:
        """Takes the columns; a UsageError names one that libsvm does not support."""
        names = [column.name for column in schema.dense]
        indexes = list(range(len(names))) if has_fields else _dense_indexes(schema)
        order = sorted(range(len(names)), key=indexes.__getitem__)
        self._schema = schema
        self._has_fields = has_fields
        self._dense = dict(zip(indexes, names, strict=True))
        self._dense_indexes = np.array([*sorted(indexes), 2**64 - 1], np.uint64)
        self._dense_columns = np.array([*order, len(names)], np.int64)
        self._slot_numbers = np.array(schema.slot_numbers, np.int64)

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        num_lines, num_blanks = count_lines_and_blanks(block)
        num_slots = len(self._schema.slots)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        dense = np.empty((num_lines, len(self._schema.dense)), np.float64)
        keys = np.empty(num_blanks + num_lines * num_slots, np.uint64)
        offsets = np.zeros(num_lines * num_slots + 1, np.int32)
        malformed = np.empty((num_lines, 3), np.int64)
        num_rows, num_malformed = scanner.scan_lines(
            block,
            self._has_fields,
            self._dense_indexes,
            self._dense_columns,
            self._slot_numbers,
            np.empty((num_blanks, 3), np.int64),
            starts,
            labels,
            dense,
            np.empty(num_slots, np.int64),
            keys,
            offsets,
            malformed,
        )
        offsets = offsets[: num_rows * num_slots + 1]
        if not self._has_fields:
            np.nan_to_num(dense[:num_rows], copy=False)
        rows = Batch(
            labels=labels[:num_rows],
            dense=self._schema.scale_dense(dense[:num_rows]),
            # Copied, because the buffer is much larger than the keys.
            keys=keys[: offsets[-1]].copy(),
            offsets=offsets,
            num_slots=num_slots,
        )
        bad_lines = [self._bad_line(block, entry) for entry in malformed[:num_malformed]]
        return without_overflows(self._schema, dense[:num_rows], rows, starts[:num_rows], bad_lines)

    def _bad_line(self, block: NDArray[np.uint8], entry: NDArray[np.int64]) -> BadLine:
        start, position = int(entry[scanner.START]), int(entry[scanner.POSITION])
        word = block[position : word_end(block, position)].tobytes()
        is_label = position == skip_blanks(block, start)
        fault = (
            f"the label is {shown(word)}, expected 0, 1 or -1" if is_label else self._fault(word)
        )
        return BadLine(int(entry[scanner.LINE]), start, fault)

    def _fault(self, word: bytes) -> str:
        form = "field:index:number" if self._has_fields else "index:number"
        pieces = word.split(b":")
        if len(pieces) != form.count(":") + 1 or not (pieces[0].isdigit() and pieces[-2]):
            return f"{shown(word)} is not of the form {form}"
        if len(pieces[0]) > MAX_KEY_DIGITS or int(pieces[0]) > _MAX_INDEX:
            return f"the first number of {shown(word)} is beyond 2**64 - 1"
        field = int(pieces[0])
        num_fields = len(self._schema.dense) + len(self._schema.slots)
        if self._has_fields and field >= num_fields:
            return (
                f"the field of {shown(word)} is not in the schema, expected 0 to {num_fields - 1}"
            )
        if field not in self._dense:
            slot = self._schema.slots[field - len(self._dense) if self._has_fields else 0]
            return f"{shown(word)} is a value of slot {slot!r}, so its number must be 1"
        name = self._dense[field]
        text = np.frombuffer(word + b"\n", np.uint8)
        number, _ = parse_decimal(text, word.rindex(b":") + 1, len(word))
        if not math.isnan(number):
            return f"{shown(word)} is the second number of {name!r}"
        return f"the number of {name!r} is {shown(pieces[-1])}, expected a number"


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
            f"libsvm has no fields, so its schema must have one slot, not {len(schema.slots)}: "
            f"use format libffm, or one slot for all indexes"
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
