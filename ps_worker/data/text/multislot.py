r"""Reader of Paddle's multi-slot text: one row a line, with the number of values and the values per column.

    columns   dense_input          user     words        click
    line      2 0.5 -3             1 7      3 12 9 44    1 1

The text has no header, so the reader takes the order of columns. Numbers are parsed by `parse_decimal`, nan
is missing, and scaled by the schema. Slot values are keys from 0 to 2^64 - 1, or, with values="text", text
that is hashed with the slot's number.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError, counted
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.text import multislot_scanner as scanner
from ctr_ps.ps_worker.data.text.column_order import ColumnOrder, Kind
from ctr_ps.ps_worker.data.text.text_reader import BadLine, TextReader, shown, without_overflows

Values = Literal["keys", "text"]

_EXPECTED = {
    scanner.LABEL: "0 or 1",
    scanner.NUMBER: "a number",
    scanner.NUMBERS: "a number",
    scanner.KEYS: "a whole number from 0 to 2**64 - 1 (values='text' hashes text)",
}


class MultiSlotScanner:
    """A `LineScanner` of multi-slot text. Stateless: threads share it.

    `slot_values` are the kinds of values.
    """

    def __init__(
        self, schema: Schema, columns: Sequence[str] | None = None, values: Values = "keys"
    ) -> None:
        """Takes the layout: the order of columns (`ColumnOrder`), and keys or text as slot values.

        Raises a UsageError that names an invalid column or value.
        """
        if values not in get_args(Values):
            expected = " or ".join(map(repr, get_args(Values)))
            raise UsageError(f"values is {values!r}, expected {expected}")
        self.slot_values = SlotValues(dict.fromkeys(schema.slots, (values, "lists")))
        self._schema = schema
        self._order = ColumnOrder(schema, columns)
        kinds = {
            Kind.LABEL: scanner.LABEL,
            Kind.NUMBER: scanner.NUMBER,
            Kind.NUMBERS: scanner.NUMBERS,
            Kind.SLOT: scanner.KEYS if values == "keys" else scanner.TEXTS,
        }
        self._kinds = np.array([kinds[kind] for kind, _ in self._order.columns], np.int64)
        numbers = schema.slot_numbers
        self._indexes = np.array(
            [numbers[i] if kind is Kind.SLOT else i for kind, i in self._order.columns], np.int64
        )
        slots = [index for kind, index in self._order.columns if kind is Kind.SLOT]
        self._places = np.argsort(slots)

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        num_lines, num_blanks = scanner.count_lines_and_blanks(block)
        num_slots = len(self._schema.slots)
        starts = np.empty(num_lines, np.int64)
        labels = np.empty(num_lines, np.float32)
        dense = np.empty((num_lines, len(self._schema.dense)), np.float64)
        keys = np.empty(num_blanks, np.uint64)
        counts = np.empty((num_lines, num_slots), np.int64)
        malformed = np.empty((num_lines, 8), np.int64)
        num_rows, num_keys, num_malformed = scanner.scan_lines(
            block, self._kinds, self._indexes, starts, labels, dense, keys, counts, malformed
        )
        ordered = np.empty(num_keys, np.uint64)
        offsets = np.empty(num_rows * num_slots + 1, np.int32)
        scanner.put_slots_in_order(keys, counts[:num_rows], self._places, ordered, offsets)
        rows = Batch(
            labels=labels[:num_rows] if self._order.has_label else None,
            dense=self._schema.scale_dense(dense[:num_rows]),
            keys=ordered,
            offsets=offsets,
            num_slots=num_slots,
        )
        bad_lines = [self._bad_line(block, entry) for entry in malformed[:num_malformed]]
        return without_overflows(self._schema, dense[:num_rows], rows, starts[:num_rows], bad_lines)

    def _bad_line(self, block: NDArray[np.uint8], entry: NDArray[np.int64]) -> BadLine:
        rest = block[entry[scanner.POSITION] : entry[scanner.STOP]].tobytes()
        return BadLine(
            int(entry[scanner.LINE]), int(entry[scanner.START]), self._fault(entry, rest)
        )

    def _fault(self, entry: NDArray[np.int64], rest: bytes) -> str:
        column, count, num_read = (
            int(entry[field]) for field in (scanner.COLUMN, scanner.COUNT, scanner.NUM_READ)
        )
        name = f"{self._order.names[column]!r} (column {column + 1} of {len(self._kinds)})"
        word = shown(rest.split(maxsplit=1)[0]) if rest.strip() else None
        match int(entry[scanner.FAULT]):
            case scanner.BAD_COUNT if word is None:
                return f"the line ends before {name}"
            case scanner.BAD_COUNT:
                return f"the count of {name} is {word}, expected a whole number"
            case scanner.WRONG_COUNT:
                return f"the count of {name} is {count}, expected {self._right_count(column)}"
            case scanner.BAD_VALUE if word is None:
                return f"the count of {name} is {count}, but the line ends after {counted(num_read, 'value')}"
            case scanner.BAD_VALUE:
                expected = _EXPECTED[int(self._kinds[column])]
                return f"value {num_read + 1} of {count} of {name} is {word}, expected {expected}"
            case _:
                return f"unexpected text after the last column, {name}: {shown(rest.rstrip())}"

    def _right_count(self, column: int) -> str:
        right = {scanner.NUMBERS: str(len(self._schema.dense)), scanner.NUMBER: "0 or 1"}
        return right.get(int(self._kinds[column]), "1")


class MultiSlotReader(TextReader):
    """Reads files of multi-slot text, plain or compressed; `slot_values` are the kinds of values."""

    def __init__(
        self,
        schema: Schema,
        bad_rows: BadRows,
        *,
        columns: Sequence[str] | None = None,
        values: Values = "keys",
    ) -> None:
        scanner = MultiSlotScanner(schema, columns, values)
        super().__init__(scanner, bad_rows)
        self.slot_values = scanner.slot_values
