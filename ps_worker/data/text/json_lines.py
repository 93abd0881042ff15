r"""Reader of JSON lines, an object a line; columns are matched by name, those in objects by dotted names.

    {"click": 1, "user": "alice", "device": {"os": "ios"}, "tags": ["a", "b"]}
    {"click": 0, "user": null, "device": null}

A key that is missing has the value null. The schema alone decides how a value is read, so what a line means
does not depend on other lines. The first lines tell names of columns and kinds of slot values.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, did_you_mean
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_matching import LABEL_NAMES
from ctr_ps.ps_worker.data.columnar.column_values import NUMBER, is_list_type, times_in
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.content import Content
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.csv_text import BYTE_ORDER_MARK
from ctr_ps.ps_worker.data.text.text_reader import (
    first_block,
    line_blocks,
    line_number,
    line_splits,
    shown,
)

logger = logging.getLogger(__name__)

UNUSABLE_KEY = b"unusable"
"""Metadata of a field of `table_of_lines`: why the reader refuses some of its values."""

_HEAD_LINES = 1000
_LONGEST = 2**63  # of integers in Arrow
_NAMES = {
    int: "whole numbers",
    float: "numbers",
    bool: "booleans",
    str: "text",
    list: "lists in lists",
    dict: "objects in lists",
}

_Row = Mapping[str, Any]
_Read = Callable[
    [Any], Any
]  # of a value that is not null; TypeError, ValueError, OverflowError if refused


Part = tuple[str, int, int]  # name of a vector, index, and width


@dataclass(frozen=True, slots=True)
class _Column:
    """A column to read."""

    name: str
    kind: pa.DataType
    read: _Read
    expected: str
    has_lists: bool = False  # in the first lines
    part: Part | None = None  # where it may be in a list

    def value(self, row: _Row) -> Any:
        """Returns the value in a line; raises DataError with the fault."""
        found = _found(row, self.name)
        vector, index, width = self.part or ("", 0, 0)
        whole = _found(row, vector) if self.part else None
        if found is not None and whole is not None:
            raise DataError(f"column {self.name!r} occurs twice, expected once")
        try:
            if whole is not None:
                if not isinstance(whole, list) or len(whole) != width:
                    raise TypeError
                found = whole[index]
            return None if found is None else self.read(found)
        except (TypeError, ValueError, OverflowError) as error:
            name, value = (self.name, found) if whole is None else (vector, whole)
            text = shown(json.dumps(value).encode())
            raise DataError(f"column {name!r} is {text}, expected {self.expected}") from error

    def array(self, rows: Sequence[_Row], faults: dict[int, str]) -> pa.Array:
        """Returns the values of lines, of a slot lists if some are; adds the first fault of a line."""
        if not self.part and "." not in self.name:
            values = [row.get(self.name) for row in rows]
            if {*map(type, values)} <= self.ready:
                with suppress(UnicodeEncodeError):
                    return pa.array(values, self.kind)
        values = [None] * len(rows)
        for place, row in enumerate(rows):
            try:
                values[place] = self.value(row)
            except DataError as error:
                faults.setdefault(place, str(error))
        if not self.has_lists and not any(isinstance(each, list) for each in values):
            return pa.array(values, self.kind)
        lists = [each if each is None or isinstance(each, list) else [each] for each in values]
        return pa.array(lists, pa.list_(self.kind))

    @property
    def ready(self) -> set[type]:
        """Types of values that Arrow takes as they are."""
        if self.has_lists or self.read is _label:
            return {NoneType}
        return {NoneType, float if self.read is _number else str}


class JsonReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        super().__init__(schema, bad_rows)
        self._num_seen = 0  # rows of messages
        self._present: set[str] = set()  # columns with a value in one of these

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return line_splits(path, num_splits)

    def fields(self, path: str) -> pa.Schema:
        return table_of_lines(_head_of(path)).schema

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        path, schema = split.path, self._schema
        seen = _names_of(path, schema) if isinstance(path, Content) else self.fields(path)
        parts = parts_of_vectors(schema)
        decoder = decoder_of_lines(path, seen.names, schema, self._bad_rows)
        lists = {each.name for each in seen if is_list_type(each.type)}
        columns = [
            _Column(name, pa.binary(), _plain, "a number or a time")
            if name in decoder.times.values() and name not in schema.features
            else _column_of(name, schema, lists, parts.get(name))
            for name in decoder.columns.stored
        ]
        for block, position in line_blocks(split, offset):
            lines = block.tobytes().split(b"\n")[:-1]
            starts = position + np.cumsum([0, *(len(line) + 1 for line in lines)])[:-1]
            found = [*map(_row_of, lines)]
            faults = {
                place: f"not a JSON object: {shown(lines[place].rstrip())}"
                for place, row in enumerate(found)
                if row is None
            }
            rows = [row or {} for row in found]
            arrays = [column.array(rows, faults) for column in columns]
            batch = pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])
            if isinstance(path, Content) and self._num_seen < _HEAD_LINES:
                self._note_absent(path, batch)
            yield from decoder.decode_good(batch, starts, faults)

    def _note_absent(self, path: str, batch: pa.RecordBatch) -> None:
        """Says which columns none of the first rows has; the first message alone may have few."""
        parts = parts_of_vectors(self._schema)
        names = [parts.get(name, (name,))[0] for name in batch.schema.names]
        columns = zip(names, batch.columns, strict=True)
        self._present |= {name for name, each in columns if each.null_count < len(each)}
        self._num_seen += len(batch)
        for name in {*names} - self._present if self._num_seen >= _HEAD_LINES else ():
            logger.warning("no row at the start of %s has %r: read as missing", path, name)


def parts_of_vectors(schema: Schema) -> dict[str, Part]:
    """Returns the parts of vectors by the names of their columns."""
    widths = schema.vectors
    return {
        f"{name}[{i}]": (name, i, width) for name, width in widths.items() for i in range(width)
    }


def decoder_of_lines(path: str, seen: Sequence[str], schema: Schema, bad_rows: BadRows) -> Decoder:
    """Returns the decoder of lines that tell their names, of which the first ones have those `seen`."""
    parts = parts_of_vectors(schema)
    times = times_in(
        (*schema.features, *schema.labels), pa.schema([(name, pa.binary()) for name in seen])
    )
    features = [name for name in schema.features if name not in times]
    owners = {name: parts.get(name, (name,))[0] for name in features}
    absent = [owner for name, owner in owners.items() if not {name, owner} & {*seen}]
    for name in dict.fromkeys(absent) if seen else ():
        hint = did_you_mean(name, seen)
        logger.warning("no row at the start of %s has %r: read as missing%s", path, name, hint)
    # Names only: of any type but lists, so that vectors are the columns of their numbers.
    fields = pa.schema([(name, pa.binary()) for name in dict.fromkeys([*seen, *features])])
    return Decoder(path, fields, schema, bad_rows, partial(line_number, path))


def table_of_lines(lines: Sequence[bytes], names: Sequence[str] | None = None) -> pa.Table:
    """Returns columns of lines, None: all; of mixed types as text; of lines that are no objects null."""
    found, faults = _columns_in([_row_of(line) or {} for line in lines])
    columns, fields = [], []
    for name in found if names is None else names:
        values = found.get(name, [None] * len(lines))
        kind, why = _type_of(values)
        why = faults.get(name, why)
        columns.append(pa.array(_converted(values, kind), kind))
        fields.append(pa.field(name, kind, metadata={UNUSABLE_KEY: why} if why else None))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _column_of(name: str, schema: Schema, lists: Collection[str], part: Part | None) -> _Column:
    """Returns how to read a column by its use; `lists` are those with lists in the first lines."""
    dense = [column.name for column in schema.dense]
    if name in (schema.id, schema.group) or (name in schema.slots and name in dense):
        return _Column(name, pa.binary(), _text, "text or a whole number")
    if name in schema.slots:
        separator = schema.split.get(name, "").encode()
        expected = "text or a whole number, or a list of these"
        has_lists = name in lists or bool(separator)
        return _Column(name, pa.binary(), partial(_slot, separator), expected, has_lists)
    if part:
        expected = f"a list of {part[2]} numbers"
        return _Column(name, pa.float64(), _number, expected, part=part)
    if name in (*dense, schema.weight):
        return _Column(name, pa.float64(), _number, "a number")
    return _Column(name, pa.float64(), _label, "0 or 1")


def _found(row: _Row, name: str) -> Any:
    """Returns the value of a name, dotted in objects; None without one. Raises DataError if there are two."""
    if "." not in name:
        return row.get(name)
    found = [*_values(row, name)]
    inside = [value for is_inside, value in found if is_inside]
    if len(inside) > 1:
        raise DataError(f"column {name!r} occurs twice, expected once")
    if found and not inside:
        text = shown(json.dumps(found[0][1]).encode())
        raise DataError(f"column {name!r} lies in {text}, expected an object")
    return inside[0] if inside else None


def _values(row: _Row, name: str) -> Iterator[tuple[bool, Any]]:
    """Yields the values of a name, and with False other values than objects around it."""
    if name in row:
        yield True, row[name]
    dot = name.find(".")
    while dot >= 0:
        around = row.get(name[:dot])
        if isinstance(around, dict):
            yield from _values(around, name[dot + 1 :])
        elif around is not None:
            yield False, around
        dot = name.find(".", dot + 1)


def _number(value: Any) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _label(value: Any) -> float:
    is_text = isinstance(value, str) and re.fullmatch(NUMBER, value, re.ASCII)
    if (label := float(value) if is_text else _number(value)) not in (0, 1):
        raise ValueError
    return label


def _text(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return str(value).encode(errors="surrogateescape")


def _plain(value: Any) -> bytes:
    return str(value).encode() if isinstance(value, float) else _text(value)


def _slot(separator: bytes, value: Any) -> bytes | list[bytes | None] | None:
    if isinstance(value, list):
        return [None if each is None else _text(each) for each in value]
    text = _text(value)
    if not separator or not isinstance(value, str):
        return text
    # As `split_texts`.
    return [each for each in text.split(separator) if each] if text else None


def _head_of(path: str) -> list[bytes]:
    lines = first_block(path).tobytes().split(b"\n")[:-1][:_HEAD_LINES]
    if lines and all(_row_of(line) is None for line in lines):
        raise DataError(
            f"{path}: its first line is {shown(lines[0])}, but JSON is read as one object a line: "
            "write it so, as pandas does with to_json(orient='records', lines=True)"
        )
    return lines


def _names_of(content: Content, schema: Schema) -> pa.Schema:
    """Returns the columns that messages may have, of no type: the first one says what lies in objects."""
    rows = map(_row_of, content.data.splitlines())
    found, _ = _columns_in([next((row for row in rows if row is not None), {})])
    label = schema.label or next((each for each in LABEL_NAMES if each in found), LABEL_NAMES[0])
    names = [label, *schema.other_labels, schema.weight, schema.id, schema.group]
    wanted = [name for name in (*schema.features, *names) if name]
    columns = [name for name in wanted if name not in found]
    maybe = pa.schema(
        [(each.rpartition(".")[0] or each.split(" ")[0], pa.binary()) for each in columns]
    )
    times = times_in(columns, maybe)
    parts = parts_of_vectors(schema)
    own = [times.get(name, parts.get(name, (name,))[0]) for name in wanted]
    return pa.schema([(name, pa.null()) for name in dict.fromkeys(own)])


def _row_of(line: bytes) -> _Row | None:
    # Slots take bytes that are no UTF-8, as in other formats.
    text = line.removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _columns_in(rows: Sequence[_Row]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Returns values by dotted name, None where a row has none, and by name why a reader refuses some."""
    found, objects = dict[str, list[Any]](), set[str]()
    faults, last = dict[str, str](), dict[str, int]()
    for place, row in enumerate(rows):
        todo = [*row.items()][::-1]
        while todo:
            name, value = todo.pop()
            if isinstance(value, dict):
                objects.add(name)
                todo += [(f"{name}.{key}", each) for key, each in reversed(value.items())]
                continue
            if last.get(name) == place:
                faults[name] = "it occurs twice in a row"
            last[name] = place
            found.setdefault(name, [None] * len(rows))[place] = value
    for name in objects & found.keys():
        if all(value is None for value in found[name]):
            del found[name]
            continue
        for each in found:
            if each == name or each.startswith(f"{name}."):
                faults[each] = f"{name!r} is an object in some rows, and none in others"
    return {_writable(name): values for name, values in found.items()}, faults


def _type_of(values: Sequence[Any]) -> tuple[pa.DataType, str]:
    """Returns the type of the values of a column, and why a reader refuses some of them, or ""."""
    lists = [value for value in values if isinstance(value, list)]
    single = [value for value in values if value is not None and not isinstance(value, list)]
    items = [*single, *(each for value in lists for each in value if each is not None)]
    kinds, kind, why = {*map(type, items)}, pa.string(), ""
    is_short = all(-_LONGEST <= each < _LONGEST for each in items if type(each) is int)
    if not kinds:
        kind = pa.null()
    elif kinds == {int} and is_short:
        kind = pa.int64()
    elif kinds <= {int, float, bool} and kinds != {int} and is_short and not (lists and single):
        kind = pa.bool_() if kinds == {bool} else pa.float64()
    elif not kinds <= {int, str}:
        why = f"mixed values: {', '.join(sorted(_NAMES[each] for each in kinds))}"
        why += ", some in lists" if lists and single else ""
    return pa.list_(kind) if lists else kind, why


def _converted(values: Sequence[Any], kind: pa.DataType) -> list[Any]:
    if is_list_type(kind):
        lists = (each if each is None or isinstance(each, list) else [each] for each in values)
        return [each and _converted(each, kind.value_type) for each in lists]
    convert: Any = {pa.string(): lambda each: _writable(str(each)), pa.float64(): float}.get(kind)
    return [each if each is None or convert is None else convert(each) for each in values]


def _writable(text: str) -> str:
    """Returns text that Arrow takes: what is no Unicode becomes "?"."""
    return text.encode(errors="replace").decode()
