"""Conversion of click logs to Parquet, which is faster to read and can be split.

A file of text has label, weight, id, numbers and slot values; any schema with these column names can read
it. A file of keys has hashed values; it can only be read with the order of slots and the version of the
feature hash in its metadata.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_matching import (
    HASH_VERSION_KEY,
    SLOT_NUMBERS_KEY,
    SLOTS_KEY,
)
from ctr_ps.ps_worker.data.columnar.column_values import KeyColumn, KeyLists, is_list_type, written
from ctr_ps.ps_worker.data.columnar.record_batches import Columns, shown
from ctr_ps.ps_worker.data.columns import columns_of, label_name
from ctr_ps.ps_worker.data.files.content import atomic_file, errors_of_writing

FINGERPRINT_KEY = b"ctr_ps.schema_fingerprint"

# Large enough for all distinct values of a row group, so that no column falls back to plain encoding.
_DICTIONARY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Converted:
    """The written files, their rows, and the number of malformed rows skipped."""

    files: list[Path]
    rows: int
    bad_rows: int


def convert(
    files: Sequence[str],  # local paths or URLs
    # a local folder, created if necessary, for part-00000.parquet, part-00001.parquet, ...
    out_dir: Path,
    schema: Schema,  # the columns to write
    *,
    # whether to write keys instead of slot values. Numbers are float64 with text, float32 with
    # keys, unscaled in both cases
    keys: bool = False,
    rows_per_file: int = 5_000_000,  # maximum rows of a file
    row_group_rows: int = 65_536,  # maximum rows of a row group, the smallest unit of a split
    format_in: str | None = None,  # one of `columns.FORMATS`; None: determined by the suffix
    bad_row_limit: int = 0,  # malformed rows to skip; one more is an error
) -> Converted:
    """Writes the rows of `files` in order as Parquet; each file is written atomically.

    Raises:
        UsageError: If a number is too small, a format cannot be converted, or `out_dir` contains Parquet.
        DataError: If a file cannot be read, there are no rows, or only some files have labels.
        BadRowError: Names file, line and fault of the malformed row that exceeded the limit.
    """
    for name, value in (("rows_per_file", rows_per_file), ("row_group_rows", row_group_rows)):
        if value < 1:
            raise UsageError(f"{name} is {value!r}, expected at least 1")
    if out_dir.is_dir() and any(out_dir.glob("*.parquet")):
        raise UsageError(f"{str(out_dir)!r} already has Parquet files: choose another folder")
    row_group_rows = min(row_group_rows, rows_per_file)
    bad_rows = BadRows(bad_row_limit)
    groups = _row_groups(_tables(files, schema, bad_rows, keys, format_in), row_group_rows)
    with errors_of_writing(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        written = list(_write_files(groups, out_dir, rows_per_file // row_group_rows))
    rows = sum(num_rows for _, num_rows in written)
    bad_rows.report(rows)
    if not rows:
        raise DataError(f"no rows to convert in {counted(len(files), 'file')}")
    return Converted([path for path, _ in written], rows, bad_rows.total)


def _write_files(
    groups: Iterator[pa.Table], folder: Path, groups_per_file: int
) -> Iterator[tuple[Path, int]]:
    for number, first in enumerate(groups):
        path = folder / f"part-{number:05d}.parquet"
        num_rows = 0
        with (
            atomic_file(path) as file,
            pq.ParquetWriter(
                file,
                first.schema,
                compression="snappy",  # zstd: a quarter smaller, a tenth slower to read
                dictionary_pagesize_limit=_DICTIONARY_BYTES,
                write_page_checksum=True,
            ) as writer,
        ):
            for group in chain([first], islice(groups, groups_per_file - 1)):
                writer.write_table(group, row_group_size=len(group))
                num_rows += len(group)
        yield path, num_rows


def _row_groups(tables: Iterator[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Yields the rows of `tables` in tables of `num_rows`, the last one of the remaining rows."""
    held: list[pa.Table] = []
    held_rows = 0
    for table in tables:
        held.append(table)
        held_rows += len(table)
        if held_rows >= num_rows:
            joined = pa.concat_tables(held)
            stop = held_rows - held_rows % num_rows
            for start in range(0, stop, num_rows):
                yield joined[start : start + num_rows]
            held, held_rows = [joined[stop:]], held_rows - stop
    if held_rows:
        yield pa.concat_tables(held)


def _tables(
    files: Sequence[str], schema: Schema, bad_rows: BadRows, keys: bool, format_in: str | None
) -> Iterator[pa.Table]:
    expected: pa.Schema | None = None
    schema = replace(schema, is_for_prediction=True)  # rows to predict are converted, too
    for path in files:
        for columns in columns_of(path, schema, bad_rows, format=format_in):
            table = (
                _key_table(columns, schema)
                if keys
                else _text_table(path, columns, schema, bad_rows)
            )
            if expected is None:
                expected = table.schema
            if not table.schema.equals(expected):
                raise DataError(
                    f"{path} has columns {_listed(table.schema)}, but the files before have "
                    f"{_listed(expected)}: convert them separately"
                )
            yield table


def _text_table(path: str, columns: Columns, schema: Schema, bad_rows: BadRows) -> pa.Table:
    if columns.are_keys:
        raise UsageError(f"{path}: the file contains keys, which cannot be converted to text")
    try:
        texts = [_texts(array) for array in columns.slots]
    except pa.ArrowInvalid:  # does not say which value
        columns = columns.where(_is_utf8(path, columns, schema, bad_rows))
        texts = [_texts(array) for array in columns.slots]
    return _table(columns, schema, pa.float64(), texts)


def _is_utf8(path: str, columns: Columns, schema: Schema, bad_rows: BadRows) -> NDArray[np.bool_]:
    """Returns a mask of the rows that can be written as text, and counts the others as malformed."""
    is_good = np.ones(len(columns.offsets), np.bool_)
    for name, array in zip(schema.slots, columns.slots, strict=True):
        if _is_text(array):
            continue
        for row in np.flatnonzero(is_good):
            value = array[row : row + 1]
            if not _is_text(value):
                is_good[row] = False
                fault = (
                    f"{name!r} is {shown(value[0].as_py())}, expected UTF-8: convert with hashed keys "
                    "instead of values"
                )
                bad_rows.add(path, f"offset {columns.offsets[row]}", fault)
    return is_good


def _is_text(array: pa.Array) -> bool:
    try:
        _texts(array)
    except pa.ArrowInvalid:
        return False
    return True


def _key_table(columns: Columns, schema: Schema) -> pa.Table:
    numbers = np.stack(columns.numbers, axis=1) if columns.numbers else np.empty((0, 0))
    with np.errstate(over="ignore"):  # of rows that are malformed
        columns = columns.without(schema.overflows(numbers, numbers.astype(np.float32)))
    size = len(columns.offsets)
    metadata = {
        HASH_VERSION_KEY: str(schema.hash_version),
        SLOTS_KEY: json.dumps(schema.slots),
        SLOT_NUMBERS_KEY: json.dumps(schema.slot_numbers),
        FINGERPRINT_KEY: schema.fingerprint,
    }
    arrays = [_keys(column, size) for column in columns.key_columns(schema.slot_numbers)]
    return _table(columns, schema, pa.float32(), arrays).replace_schema_metadata(metadata)


def _table(
    columns: Columns, schema: Schema, number: pa.DataType, slots: Sequence[pa.Array]
) -> pa.Table:
    by_name: dict[str, pa.Array] = {}
    found = columns.row_columns
    if "labels" in found:
        by_name[label_name(schema)] = pa.array(found["labels"].astype(np.int8))
    for index, name in enumerate(schema.other_labels if "other_labels" in found else ()):
        by_name[name] = pa.array(found["other_labels"][:, index].astype(np.int8))
    if "weights" in found and schema.weight is not None:
        by_name[schema.weight] = pa.array(found["weights"])
    if "ids" in found and schema.id is not None and schema.id not in schema.features:
        by_name[schema.id] = pa.array(found["ids"], pa.string())
    for column, values in zip(schema.dense, columns.numbers, strict=True):
        by_name[column.name] = pa.array(values, number, from_pandas=True)  # nan is null
    for name, array in zip(schema.slots, slots, strict=True):
        by_name.setdefault(name, array)
    return pa.table(by_name)


def _texts(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.list_(pa.string()) if is_list_type(array.type) else pa.string())


def _keys(column: KeyColumn | KeyLists, size: int) -> pa.Array:
    if isinstance(column, KeyLists):
        return pa.LargeListArray.from_arrays(pa.array(column.bounds), pa.array(column.keys))
    return pa.array(written(column, 0, size))


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
