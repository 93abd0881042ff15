r"""Reader of JSON lines, an object a line; columns are matched by name, those of objects by dotted names.

    {"click": 1, "user": "alice", "device": {"os": "ios"}, "tags": ["a", "b"]}
    {"click": 0, "user": null, "device": null}

A key that is missing has the value null. The first block of a file tells its columns and their types, by
which Arrow reads all blocks; a block with a line that these do not fit is read line by line, with the same
result. So rows do not depend on where a block begins.
"""

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from ctr_ps.protos.errors import DataError, did_you_mean
from ctr_ps.ps_worker.data.columnar.column_matching import check_types, match_columns
from ctr_ps.ps_worker.data.columnar.column_values import (
    flat,
    is_list_type,
    is_slot_type,
    is_text_type,
    type_of_values,
)
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.text_reader import (
    BLOCK_BYTES,
    line_blocks,
    line_splits,
    lines_before,
    shown,
)

logger = logging.getLogger(__name__)

_NEWLINE = np.uint8(ord("\n"))
_HEAD_LINES = 1000
_LIST = "[]"
_NUMBERS = {"int", "float", "bool"}
_VALUES = {"int", "str", _LIST}
_LABELS = _NUMBERS | _VALUES
_TEXTS = pa.list_(pa.string())
_UNUSABLE = pa.struct([])  # of lists of objects, and of values of which no feature is made


@dataclass(frozen=True, slots=True)
class _Column:
    """A column: its keys, from the outermost object on, and the kinds of its values."""

    keys: tuple[str, ...]
    seen: frozenset[str]  # names of Python's types, and `_LIST`, whose elements count as values

    @property
    def kind(self) -> pa.DataType:
        return _type_of(self.seen)


class JsonReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return line_splits(path, num_splits)

    def fields(self, path: str) -> pa.Schema:
        return pa.schema([(name, each.kind) for name, each in _head_of(path).items()])

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        path, schema = split.path, self._schema
        found, own = (
            _head_of(path),
            {column.name for column in schema.dense} | {schema.weight or ""},
        )
        for name, each in found.items():
            # One malformed row does not decide.
            allowed = _NUMBERS if name in own else _VALUES if name in schema.slots else _LABELS
            fitting = replace(each, seen=each.seen & allowed)
            found[name] = each if fitting.kind == pa.null() else fitting
        is_empty = not found
        for name in [each for each in schema.features if each not in found]:
            found[name] = _Column(tuple(name.split(".")), frozenset())
            if is_empty:
                continue
            logger.warning(
                "no row at the start of a file has a column, it is read as missing there: file=%s "
                "column=%s%s",
                path,
                name,
                did_you_mean(name, [each for each in found if each != name]),
            )
        fields = pa.schema([(name, each.kind) for name, each in found.items()])
        columns = match_columns(path, fields, schema)
        check_types(path, fields, schema, columns)
        decoder = Decoder(path, schema, columns, self._bad_rows, lambda at: _place(path, at))
        read = {name: found[name] for name in columns.names}
        for name in own & read.keys():
            if not pa.types.is_boolean(read[name].kind):
                read[name] = replace(read[name], seen=frozenset({"float"}))  # 1.5 may follow 1
        for block, position in line_blocks(split, offset):
            rows, starts, faults = _read(block, read)
            for start, fault in faults:
                at = position + start
                place = _place(path, at) if self._bad_rows.is_shown else ""
                self._bad_rows.add(path, place, fault)
            if len(rows):
                yield decoder.decode(rows, position + starts)


def table_of_lines(lines: Sequence[bytes]) -> pa.Table:
    """Returns all columns of lines, in types that fit all of them; lines that are no objects are left out."""
    rows = [row for line in lines if (row := _row_of(line)) is not None]
    columns = _columns_in("the sample", rows)
    rows = [row for row in rows if not _fault_of(row, columns)]
    table = {}
    for name, array in zip(columns, _arrays(rows, columns), strict=True):
        kind = columns[name].kind
        if is_slot_type(kind) and not is_text_type(type_of_values(kind)):
            array = array.cast(_TEXTS if is_list_type(kind) else pa.string()).cast(kind)  # noqa: PLW2901
        table[name] = array
    return pa.table(table)


def _head_of(path: str) -> dict[str, _Column]:
    with closing(line_blocks(FileSplit(path))) as blocks:
        block, _ = next(blocks, (np.empty(0, np.uint8), 0))
        lines = block.tobytes().split(b"\n")[:_HEAD_LINES]
    columns = _columns_in(path, [row for line in lines if (row := _row_of(line)) is not None])
    if not columns and any(lines):
        raise DataError(
            f"{path}: its first line is {shown(lines[0])}, but JSON is read as one object a line: "
            "write it so, as pandas does with to_json(orient='records', lines=True)"
        )
    return columns


def _columns_in(path: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, _Column]:
    """Returns the columns of objects, by dotted name in order of occurrence."""
    kinds: dict[tuple[str, ...], set[str]] = {}

    def note(row: Mapping[str, Any], keys: tuple[str, ...]) -> None:
        for key, value in row.items():
            place = (*keys, key)
            if isinstance(value, dict):
                note(value, place)
            elif isinstance(value, list):
                kinds.setdefault(place, set()).update((_LIST, *map(_kind_of, value)))
            else:
                kinds.setdefault(place, set()).add(_kind_of(value))

    for row in rows:
        note(row, ())
    columns: dict[str, _Column] = {}
    for keys, seen in kinds.items():
        name = ".".join(keys)
        if name in columns:
            raise DataError(f"{path}: column {name!r} is in an object and beside it, expected once")
        columns[name] = _Column(keys, frozenset(seen))
    return columns


def _kind_of(value: object) -> str:
    is_long = type(value) is int and not -(2**63) <= value < 2**63
    return "str" if is_long else type(value).__name__  # its digits


@functools.cache
def _type_of(kinds: frozenset[str]) -> pa.DataType:
    single = kinds - {_LIST, "NoneType"}
    if not single:
        found = pa.string() if _LIST in kinds else pa.null()
    elif single == {"bool"}:
        found = pa.bool_()
    elif single == {"int"}:
        found = pa.int64()
    elif single <= {"int", "float", "bool"}:
        found = pa.float64()
    elif single <= {"int", "str"}:
        found = pa.string()
    else:
        return _UNUSABLE
    return pa.list_(found) if _LIST in kinds else found


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
        line = text[start:stop].rstrip()
        row = _row_of(line)
        fault = f"not a JSON object: {shown(line)}" if row is None else _fault_of(row, columns)
        if row is None or fault:
            faults.append((start, fault))
        else:
            rows.append(row)
            kept.append(start)
    found = pa.RecordBatch.from_arrays(_arrays(rows, columns), names=[*columns])
    return found, np.array(kept, np.int64), faults


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
        table.validate()
    except pa.ArrowInvalid:
        return None
    return flat(table.combine_chunks().to_batches()[0]) if len(table) else None


def _fields(tree: Mapping[str, Any]) -> list[pa.Field]:
    return [
        pa.field(key, pa.struct(_fields(each)) if isinstance(each, dict) else each)
        for key, each in tree.items()
    ]


def _row_of(line: bytes) -> dict[str, Any] | None:
    # As Arrow, which does not look at what is no UTF-8.
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _value_of(row: Mapping[str, Any], column: _Column) -> Any:
    """Returns a value for an array of `_wide(column.kind)`; TypeError or ValueError if it does not fit."""
    value: Any = row
    for key in column.keys:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise TypeError
        value = value.get(key)
    return _plain(value, column.kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if kind == _UNUSABLE:
        return {}
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
    if kind == _UNUSABLE:
        return kind
    if is_list_type(kind):
        return pa.list_(_wide(kind.value_type))
    return pa.binary() if is_slot_type(kind) else pa.float64()


def _fault_of(row: Mapping[str, Any], columns: Mapping[str, _Column]) -> str:
    for name, column in columns.items():
        try:
            _value_of(row, column)
        except (TypeError, ValueError, OverflowError):
            what = "text or a whole number" if is_slot_type(column.kind) else "a number"
            many = ", or a list of these" if is_list_type(column.kind) else ""
            text = json.dumps(row.get(column.keys[0])).encode()
            return f"column {name!r} is {shown(text)}, expected {what}{many}"
    return ""


def _arrays(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, _Column]) -> list[pa.Array]:
    return [
        pa.array([_value_of(row, each) for row in rows], _wide(each.kind))
        for each in columns.values()
    ]


def _place(path: str, offset: int) -> str:
    return str(lines_before(path, offset) + 1)
