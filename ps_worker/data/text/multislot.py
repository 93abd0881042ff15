r"""Reader of Paddle's multi-slot text: one row a line, with the number of values and the values per column.

    columns   dense_input          user     words        click
    line      2 0.5 -3             1 7      3 12 9 44    1 1

The text has no header, so the reader takes the order of columns. Numbers are parsed by `parse_decimal`, nan
is missing, and scaled by the schema. Slot values are keys from 0 to 2^64 - 1, or, with values="text", text
that is hashed with the slot's number.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError, counted, did_you_mean
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.text import multislot_scanner as scanner
from ctr_ps.ps_worker.data.text.text_reader import BadLine, TextReader, shown, without_overflows

DENSE_GROUP = "dense_input"
LABEL_NAMES = ("click", "label")

Values = Literal["keys", "text"]

_EXPECTED = {
    scanner.LABEL: "0 or 1",
    scanner.NUMBER: "a number",
    scanner.NUMBERS: "a number",
    scanner.KEYS: "a whole number from 0 to 2**64 - 1 (values='text' hashes text)",
}


class Kind(IntEnum):
    """The kind of a column."""

    LABEL = scanner.LABEL
    NUMBER = scanner.NUMBER
    NUMBERS = scanner.NUMBERS
    SLOT = scanner.KEYS  # or TEXTS


_KIND_NAMES = {
    Kind.LABEL: "a label",
    Kind.NUMBER: "a dense column",
    Kind.NUMBERS: "all dense columns",
    Kind.SLOT: "a slot",
}

Column = tuple[Kind, int]


class ColumnOrder:
    """The columns of a row, checked against a schema."""

    def __init__(self, schema: Schema, names: Sequence[str] | None = None) -> None:
        """Checks the names in order; a UsageError names an unknown, ambiguous, repeated or missing one.

        They are "dense_input" for all dense columns together, or the name of each of them; the slots; and the
        label if rows have one: `schema.label`, or if that is None "click" or "label". None: "dense_input", if
        there are dense columns, the slots, the label.
        """
        if isinstance(names, str):
            raise UsageError(f"columns is {names!r}, expected a list of names")
        if names is None:
            names = (
                *([DENSE_GROUP] if schema.dense else []),
                *schema.slots,
                _label_names(schema)[0],
            )
        meanings = _meanings(schema)
        self.names = tuple(names)
        # kind and index of each: of a NUMBER the dense column, of a SLOT the slot, from 0
        self.columns = tuple(_only_meaning(name, meanings) for name in self.names)
        self.has_label = (Kind.LABEL, 0) in self.columns  # whether the label is among them
        _refuse_repeated(self.names, self.columns)
        _refuse_incomplete(self.columns, schema)


class MultiSlotScanner:
    """A `LineScanner` of multi-slot text. Stateless: threads share it."""

    def __init__(
        self, schema: Schema, columns: Sequence[str] | None = None, values: Values = "keys"
    ) -> None:
        """Takes the order of columns (`ColumnOrder`), and the form of slot values; UsageError if invalid."""
        if values not in get_args(Values):
            expected = " or ".join(map(repr, get_args(Values)))
            raise UsageError(f"values is {values!r}, expected {expected}")
        self.slot_values = SlotValues(dict.fromkeys(schema.slots, (values, "lists")))
        self._schema = schema
        self._order = ColumnOrder(schema, columns)
        self._kinds = np.array([kind for kind, _ in self._order.columns], np.int64)
        if values == "text":
            self._kinds[self._kinds == scanner.KEYS] = scanner.TEXTS
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
        bad_lines = [
            BadLine(entry[scanner.LINE], entry[scanner.START], self._fault(block, *entry[2:]))
            for entry in malformed[:num_malformed].tolist()
        ]
        return without_overflows(self._schema, dense[:num_rows], rows, starts[:num_rows], bad_lines)

    def _fault(
        self,
        block: NDArray[np.uint8],
        stop: int,
        fault: int,
        column: int,
        position: int,
        count: int,
        num_read: int,
    ) -> str:
        rest = block[position:stop].tobytes()
        name = f"{self._order.names[column]!r} (column {column + 1} of {len(self._kinds)})"
        word = shown(rest.split(maxsplit=1)[0]) if rest.strip() else None
        match fault:
            case scanner.BAD_COUNT if word is None:
                return f"the line ends before {name}"
            case scanner.BAD_COUNT:
                return f"the count of {name} is {word}, expected a whole number"
            case scanner.WRONG_COUNT:
                right = {scanner.NUMBERS: len(self._schema.dense), scanner.NUMBER: "0 or 1"}
                expected = right.get(int(self._kinds[column]), 1)
                return f"the count of {name} is {count}, expected {expected}"
            case scanner.BAD_VALUE if word is None:
                return f"the count of {name} is {count}, but the line ends after {counted(num_read, 'value')}"
            case scanner.BAD_VALUE:
                expected = _EXPECTED[int(self._kinds[column])]
                return f"value {num_read + 1} of {count} of {name} is {word}, expected {expected}"
            case _:
                return f"unexpected text after the last column, {name}: {shown(rest.rstrip())}"


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


def _meanings(schema: Schema) -> Mapping[str, Sequence[Column]]:
    meanings: defaultdict[str, list[Column]] = defaultdict(list)
    for index, column in enumerate(schema.dense):
        meanings[column.name].append((Kind.NUMBER, index))
    for index, name in enumerate(schema.slots):
        meanings[name].append((Kind.SLOT, index))
    for name in _label_names(schema):
        meanings[name].append((Kind.LABEL, 0))
    if schema.dense:
        meanings[DENSE_GROUP].append((Kind.NUMBERS, 0))
    return dict(meanings)


def _label_names(schema: Schema) -> tuple[str, ...]:
    return LABEL_NAMES if schema.label is None else (schema.label,)


def _only_meaning(name: str, meanings: Mapping[str, Sequence[Column]]) -> Column:
    if name not in meanings:
        hint = did_you_mean(str(name), meanings)
        raise UsageError(f"columns has an unknown name {name!r}{hint}")
    if len(meanings[name]) > 1:
        kinds = " and ".join(_KIND_NAMES[kind] for kind, _ in meanings[name])
        raise UsageError(f"name {name!r} means both {kinds}: rename one of them in the schema")
    return meanings[name][0]


def _refuse_repeated(names: Sequence[str], columns: Sequence[Column]) -> None:
    seen: dict[Column, str] = {}
    for name, column in zip(names, columns, strict=True):
        if seen.get(column) == name:
            raise UsageError(f"columns has {name!r} twice: remove one")
        if column in seen:
            raise UsageError(
                f"columns has {seen[column]!r} and {name!r}, which mean the same: remove one"
            )
        seen[column] = name
    single = [name for name, (kind, _) in zip(names, columns, strict=True) if kind is Kind.NUMBER]
    if single and (Kind.NUMBERS, 0) in seen:
        raise UsageError(
            f"columns has {single[0]!r} and {DENSE_GROUP!r}, which includes it: remove one"
        )


def _refuse_incomplete(columns: Sequence[Column], schema: Schema) -> None:
    missing = [name for i, name in enumerate(schema.slots) if (Kind.SLOT, i) not in columns]
    if (Kind.NUMBERS, 0) not in columns:
        dense = enumerate(schema.dense)
        missing += [column.name for i, column in dense if (Kind.NUMBER, i) not in columns]
    if missing:
        raise UsageError(f"columns has no {missing[0]!r}, expected every column of the schema")
