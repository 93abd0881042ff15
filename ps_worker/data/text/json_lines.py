r"""Reader of JSON lines, an object a line; columns are matched by name, those in objects by dotted names.

    {"click": 1, "user": "alice", "device": {"os": "ios"}, "tags": ["a", "b"]}
    {"click": 0, "user": null, "device": null}

A key that is missing has the value null. Arrow reads a block in the types of the file's first lines; a block
with a line that these do not fit is read line by line. Both give the same keys and numbers, so that rows do
not depend on where a block begins.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, did_you_mean
from ctr_ps.ps_worker.data.columnar.column_values import flat, is_list_type, is_slot_type
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.text_reader import (
    BLOCK_BYTES,
    first_block,
    line_blocks,
    line_number,
    line_splits,
    shown,
)

logger = logging.getLogger(__name__)

_NEWLINE = np.uint8(ord("\n"))
_HEAD_LINES = 1000
_LONGEST = 2**63  # of integers that Arrow reads; longer ones are read as their digits

_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column to read: its keys, from the outermost object on, and its type."""

    keys: tuple[str, ...]
    kind: pa.DataType


class JsonReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return line_splits(path, num_splits)

    def fields(self, path: str) -> pa.Schema:
        return _table(_head_of(path)).schema

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        path, schema = split.path, self._schema
        head = _head_of(path)
        seen = _table(head).schema
        plain, names = seen.names, flat(seen, schema.vectors).names
        absent = [name for name in schema.features if name not in names]
        for name in absent if head else ():
            hint = did_you_mean(name, names)
            logger.warning("no row at the start of %s has %r: read as missing%s", path, name, hint)
        found = {name: _column_of(name, head, schema) for name in (*plain, *absent)}
        fields = pa.schema([(name, found[name].kind) for name in (*plain, *absent)])
        decoder = Decoder(path, fields, schema, self._bad_rows, partial(line_number, path))
        read = {name: found[name] for name in decoder.columns.stored}
        for block, position in line_blocks(split, offset):
            rows, starts, faults = _read(block, read)
            for start, fault in faults:
                self._bad_rows.add(path, partial(line_number, path, position + start), fault)
            if len(rows):
                yield decoder.decode(rows, position + starts)


def table_of_lines(lines: Sequence[bytes]) -> pa.Table:
    """Returns all columns of lines, of mixed types as text; of lines that are no objects null."""
    return _table([_row_of(line) or {} for line in lines])


def _found(row: _Row, keys: Sequence[str], *, is_strict: bool = False) -> Any:
    """Returns a value in an object; None if it or an object around it is missing.

    If strict, raises TypeError for another value in the place of an object.
    """
    value: Any = row
    for key in keys:
        if is_strict and not isinstance(value, dict | None):
            raise TypeError
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _table(rows: Sequence[_Row]) -> pa.Table:
    table = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            table[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            texts = [None if each is None else str(each) for each in values]
            table[name] = pa.array([each and each.encode(errors="replace") for each in texts])
    return flat(pa.table(table))


def _head_of(path: str) -> list[_Row]:
    lines = first_block(path).tobytes().split(b"\n")[:_HEAD_LINES]
    rows = [row for line in lines if (row := _row_of(line)) is not None]
    if not rows and any(lines):
        raise DataError(
            f"{path}: its first line is {shown(lines[0])}, but JSON is read as one object a line: "
            "write it so, as pandas does with to_json(orient='records', lines=True)"
        )
    return rows


def _column_of(name: str, head: Sequence[_Row], schema: Schema) -> _Column:
    is_key = any(name in row for row in head)
    keys = (name,) if is_key else tuple(name.split("."))
    values = [_found(row, keys) for row in head]
    has_lists = any(isinstance(each, list) for each in values)
    kinds = {
        type(each)
        for value in values
        for each in (value if isinstance(value, list) else [value])
        if type(each) is not int or -_LONGEST <= each < _LONGEST
    }
    if name in (*schema.slots, schema.id, schema.group):
        kind = pa.int64() if kinds - {type(None)} == {int} else pa.string()
        return _Column(keys, pa.list_(kind) if has_lists else kind)
    is_number = name == schema.weight or any(name == each.name for each in schema.dense)
    if bool in kinds and kinds <= {bool, type(None)}:
        return _Column(keys, pa.bool_())
    if has_lists:
        return _Column(keys, pa.list_(pa.float64()))
    if is_number or float in kinds:
        return _Column(keys, pa.float64())
    return _Column(keys, pa.string() if str in kinds else pa.int64())


def _read(
    block: NDArray[np.uint8], columns: Mapping[str, _Column]
) -> tuple[pa.RecordBatch, NDArray[np.int64], list[tuple[int, str]]]:
    """Returns the rows of good lines, the starts of these int64[n], and start and fault of the others."""
    ends = np.flatnonzero(block == _NEWLINE) + 1
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    if (found := _read_at_once(block, columns)) is not None and len(found) == len(starts):
        return found, starts, []
    text = block.tobytes()
    rows, kept, faults = [], [], list[tuple[int, str]]()
    for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
        try:
            rows.append(_values_in(text[start:stop].rstrip(), columns))
            kept.append(start)
        except DataError as error:
            faults.append((start, str(error)))
    by_column = zip(*rows, strict=True) if rows else [()] * len(columns)
    arrays = map(pa.array, by_column, [_wide(each.kind) for each in columns.values()])
    return pa.RecordBatch.from_arrays([*arrays], [*columns]), np.array(kept, np.int64), faults


def _values_in(line: bytes, columns: Mapping[str, _Column]) -> list[Any]:
    """Returns the values of a line; raises DataError with its fault."""
    if (row := _row_of(line)) is None:
        raise DataError(f"not a JSON object: {shown(line)}")
    values = []
    for name, column in columns.items():
        try:
            value = _found(row, column.keys, is_strict=True)
            values.append(_plain(value, column.kind))
        except (TypeError, ValueError, OverflowError) as error:
            what = "text or a whole number" if is_slot_type(column.kind) else "a number"
            many = ", or a list of these" if is_list_type(column.kind) else ""
            text = shown(json.dumps(row.get(column.keys[0])).encode())
            raise DataError(f"column {name!r} is {text}, expected {what}{many}") from error
    return values


def _read_at_once(
    block: NDArray[np.uint8], columns: Mapping[str, _Column]
) -> pa.RecordBatch | None:
    """Returns the rows as Arrow reads them; None if a line does not fit."""
    tree: dict[str, Any] = {}
    for column in columns.values():
        *parents, last = column.keys
        node = tree
        for key in parents:
            if not isinstance(node := node.setdefault(key, {}), dict):
                return None  # a value in some rows, an object in others
        node[last] = column.kind
    try:
        table = arrow_json.read_json(
            pa.py_buffer(block),
            read_options=arrow_json.ReadOptions(use_threads=False, block_size=2 * BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(
                explicit_schema=pa.schema(_fields(tree)), unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid:
        return None
    return flat(table.combine_chunks().to_batches()[0]) if len(table) else None


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [
        pa.field(key, pa.struct(_fields(each)) if isinstance(each, dict) else each)
        for key, each in tree.items()
    ]


def _row_of(line: bytes) -> _Row | None:
    # As Arrow, which does not look at what is no UTF-8.
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Returns a value for an array of `_wide(kind)`; TypeError or ValueError if it does not fit."""
    if value is None:
        return None
    if is_list_type(kind):
        values = value if isinstance(value, list) else [value]
        return [_plain(each, kind.value_type) for each in values]
    if not is_slot_type(kind):
        if isinstance(value, str):
            raise TypeError
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    return str(value).encode(errors="surrogateescape")


def _wide(kind: pa.DataType) -> pa.DataType:
    """Returns the type of all values that a column may have."""
    if is_list_type(kind):
        return pa.list_(_wide(kind.value_type))
    return pa.binary() if is_slot_type(kind) else pa.float64()
