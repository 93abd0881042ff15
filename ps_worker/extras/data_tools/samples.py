"""Samples of files with named columns (`formats.NAMED`): rows from all over the files."""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import Schema, criteo_schema
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.bad_rows import BadRows, silent_bad_rows
from ctr_ps.ps_worker.data.blocks import Reader
from ctr_ps.ps_worker.data.columnar.column_matching import HASH_VERSION_KEY
from ctr_ps.ps_worker.data.columnar.column_values import NUMBER, WHOLE, flat, without_views
from ctr_ps.ps_worker.data.columnar.parquet_orc import COLUMNAR
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader
from ctr_ps.ps_worker.data.columns import slots_only
from ctr_ps.ps_worker.data.files.content import CODECS, suffix_of
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import size_of
from ctr_ps.ps_worker.data.formats import NAMED, doubt_about, format_of, header_hint, reader_of
from ctr_ps.ps_worker.data.text.criteo import CriteoReader
from ctr_ps.ps_worker.data.text.json_lines import UNUSABLE_KEY, table_of_lines
from ctr_ps.ps_worker.data.text.text_reader import first_block, line_blocks, line_splits

SAMPLE_ROWS = 200_000

_MAX_FILES = 16
_PIECES_PER_FILE = 8
_CRITEO_COLUMNS = (39, 40)  # without and with a label
_ANY = Schema(dense=(), slots=("-",))


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of files, column by column."""

    # values by name, an array of all rows: of a Parquet or ORC file in their type, without
    # dictionaries and views; of CSV bytes, null where empty
    columns: Mapping[str, pa.Array]
    # reason why a column has no values here, by name: two columns of one name, or not in all files
    unusable: Mapping[str, str]
    is_text: bool  # whether the files are CSV, so that types have to be told from the text
    num_rows: int
    total_rows: int  # rows of all files; estimated by their sizes unless `is_complete`
    is_complete: bool  # whether the sample is all rows


def sample_of(files: Sequence[str], format: str | None = None) -> Sample:
    """Returns up to `SAMPLE_ROWS` rows of files, or a few more: from up to 16 files, 8 places in each.

    A file's places are spread over it, since rows are often sorted; of compressed text its start is read.

    Raises:
        UsageError: If a file has no named columns, or holds keys.
        DataError: If a file cannot be read, there are no rows, or a column's types cannot be joined.
    """
    for path in files:
        _require_names(path, format)
    step = max(1, len(files) / _MAX_FILES)
    chosen = [files[int(number * step)] for number in range(min(len(files), _MAX_FILES))]
    fields = {path: names_of(path, format) for path in chosen}
    names, unusable = _common_names(fields)
    # Without a single usable column rows cannot even be counted.
    pieces = [_pieces(path, names, format, SAMPLE_ROWS // len(chosen)) for path in chosen]
    tables = [table for piece in pieces for table in piece.tables]
    for field in [field for table in tables for field in table.schema]:
        if why := (field.metadata or {}).get(UNUSABLE_KEY):
            unusable[field.name] = why.decode()
    names = [name for name in names if name not in unusable]
    num_rows = sum(len(table) for table in tables)
    if not num_rows:
        raise DataError(f"no rows in {counted(len(files), 'file')}: {', '.join(files[:3])}")
    is_complete = len(chosen) == len(files) and all(piece.is_complete for piece in pieces)
    read_share = sum(
        size_of(path) * piece.share for path, piece in zip(chosen, pieces, strict=True)
    )
    total_size = sum(map(size_of, files))
    estimate = round(num_rows * total_size / max(read_share, 1))
    kind = format or format_of(files[0])
    columns = _joined(tables, names)
    if kind == "paddlerec":
        columns = {name: _typed(array) for name, array in columns.items()}
    return Sample(
        columns=columns,
        unusable=unusable,
        is_text=kind == "csv",
        num_rows=num_rows,
        total_rows=num_rows if is_complete else max(num_rows, estimate),
        is_complete=is_complete,
    )


def sample_of_table(table: pa.Table) -> Sample:
    """Returns up to `SAMPLE_ROWS` rows of a table, from 8 places of it; raises DataError without rows."""
    names, unusable = _common_names({"the table": table.column_names})
    if not len(table):
        raise DataError("no rows in the table")
    step = -(-len(table) // _PIECES_PER_FILE)
    size = min(step, SAMPLE_ROWS // _PIECES_PER_FILE)
    pieces = [table.slice(start, size) for start in range(0, len(table), step)]
    num_rows = sum(map(len, pieces))
    return Sample(
        columns=_joined(pieces, names),
        unusable=unusable,
        is_text=False,
        num_rows=num_rows,
        total_rows=len(table),
        is_complete=num_rows == len(table),
    )


def names_of(path: str, format: str | None = None) -> list[str]:
    """Returns the names of a file's columns; raises UsageError if it has none or holds keys, or DataError."""
    _require_names(path, format)
    name = format or format_of(path)
    reader = reader_of(path, _ANY, silent_bad_rows(), name)
    assert isinstance(reader, ColumnReader)
    fields = reader.fields(path)
    if name == "csv" and len(fields) in _CRITEO_COLUMNS:
        _refuse_criteo(path)
    if HASH_VERSION_KEY in (fields.metadata or {}):
        raise UsageError(f"{path}: the file contains keys, which need the schema that made them")
    return list(fields.names)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Rows of one file: `share` of it, by rows or bytes."""

    tables: list[pa.Table]
    share: float
    is_complete: bool


def _require_names(path: str, format: str | None) -> None:
    name = format or format_of(path)
    if name == "criteo":
        _refuse_criteo(path)
    if name not in NAMED:
        fault = doubt_about(path, format) or (
            f"files of format {name!r} have no names of columns{header_hint(path)}"
        )
        raise UsageError(
            f"{path}: {fault}. If its format is one of {', '.join(NAMED)}, give --format; else write a "
            "schema by hand (docs/schema.md)"
        )


def _refuse_criteo(path: str) -> None:
    """Refuses a file that the schema of Criteo's click logs reads: it needs no other."""
    bad_rows = silent_bad_rows()
    blocks = CriteoReader(criteo_schema(), bad_rows).blocks(FileSplit(path))
    rows = next((block.rows.size for block in blocks), 0)
    if rows > bad_rows.total:
        raise UsageError(
            f"{path}: the rows have Criteo's layout (label, 13 numbers, 26 categories, tab-separated, no "
            f"header), whose schema comes with the package: write a job with data.schema = "
            f'"criteo" and data.format = "criteo", as `ps-worker example deepfm` does'
        )


def _common_names(by_file: Mapping[str, list[str]]) -> tuple[list[str], dict[str, str]]:
    """Returns the columns that can be read in all files, and the reasons why others cannot."""
    unusable: dict[str, str] = {}
    every = list(dict.fromkeys(itertools.chain.from_iterable(by_file.values())))
    for name in every:
        for path, names in by_file.items():
            if name not in names:
                unusable[name] = f"not in {path}"
            elif names.count(name) > 1:
                unusable[name] = f"{names.count(name)} columns have this name"
    if "" in every:
        unusable[""] = "has no name"
    return [name for name in every if name not in unusable], unusable


def _pieces(path: str, names: Sequence[str], format: str | None, num_rows: int) -> _Pieces:
    if not names:
        return _Pieces([], 0.0, True)
    kind = format or format_of(path)
    if kind in ("csv", "paddlerec"):
        # Every column as a slot: the reader gives their bytes, and logs malformed rows.
        reader = reader_of(path, slots_only(names), BadRows(sys.maxsize), kind)
        return _text_pieces(path, num_rows, partial(_slot_rows, reader, names))
    if kind == "json":
        pieces = _text_pieces(path, num_rows, _json_rows)
        lines = [line for table in pieces.tables for line in table["line"].to_pylist()]
        return replace(pieces, tables=[table_of_lines(lines, names)] if lines else [])
    return _columnar_pieces(path, kind, names, num_rows)


_Rows = Iterator[tuple[pa.Table, NDArray[np.int64]]]  # with their offsets


def _slot_rows(reader: Reader, names: Sequence[str], split: FileSplit) -> _Rows:
    assert isinstance(reader, ColumnReader)
    for columns in reader.columns(split):
        yield pa.table(dict(zip(names, columns.slots, strict=True))), columns.offsets


def _json_rows(split: FileSplit) -> _Rows:
    for block, position in line_blocks(split):
        lines = block.tobytes().split(b"\n")[:-1]
        ends = np.cumsum([len(line) + 1 for line in lines])
        yield pa.table({"line": lines}), position + np.concatenate([[0], ends[:-1]])


def _text_pieces(path: str, num_rows: int, rows_of: Callable[[FileSplit], _Rows]) -> _Pieces:
    splits = line_splits(path, _PIECES_PER_FILE)
    tables: list[pa.Table] = []
    read, is_complete = 0.0, True
    for split in splits:
        wanted = -(-num_rows // len(splits))
        for rows, offsets in rows_of(split):
            if not wanted:  # there are more
                is_complete = False
                break
            table = rows[:wanted]
            tables.append(table)
            wanted -= len(table)
            last = int(offsets[len(table) - 1])
            if len(table) < len(offsets):
                is_complete = False
                break
        else:
            read += (split.stop or size_of(path)) - split.start
            continue
        read += _stored(path, last) - split.start
    return _Pieces(tables, 1.0 if is_complete else read / max(size_of(path), 1), is_complete)


def _stored(path: str, num_bytes: int) -> float:
    """Returns the stored size of bytes of content; estimated by the first ones of compressed text."""
    codec = CODECS.get(suffix_of(path))
    if codec is None:
        return num_bytes
    block = first_block(path)
    return num_bytes * len(pa.compress(block, codec, asbytes=True)) / len(block)


def _columnar_pieces(path: str, kind: str, names: Sequence[str], num_rows: int) -> _Pieces:
    reader = COLUMNAR[kind]
    splits = reader(_ANY, silent_bad_rows()).splits(path, _PIECES_PER_FILE)
    wanted = -(-num_rows // max(len(splits), 1))
    tables = []
    with reader.open(path) as file:
        for split in splits:
            groups = range(len(file.sizes))[split.start : split.stop]
            first = next(file.batches(groups, wanted, list(names)), None)
            if first is not None:
                rows, first = np.arange(len(first)), flat(first)
                # Copied: a slice would keep its group.
                columns = [_plain(array).take(rows) for array in first.columns]
                tables.append(pa.table(columns, first.schema.names))
        read = sum(map(len, tables))
        return _Pieces(tables, read / max(file.num_rows, 1), read == file.num_rows)


def _joined(tables: Sequence[pa.Table], names: Sequence[str]) -> dict[str, pa.Array]:
    columns = {}
    for name in names:
        chunks = [_plain(chunk) for table in tables for chunk in table.column(name).chunks]
        try:
            joined = pa.concat_tables(
                [pa.table({name: chunk}) for chunk in chunks], promote_options="permissive"
            )
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            kinds = " and ".join(sorted({str(chunk.type) for chunk in chunks}))
            raise DataError(
                f"column {name!r} has different types in different files, {kinds}: write it with one type, "
                f"or name only files in which it has one type"
            ) from error
        array = joined.column(name).combine_chunks()
        columns[name] = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    return columns


def _typed(lists: pa.Array) -> pa.Array:
    """Returns text in lists as numbers, if not all are whole ones, and single if no list has several."""
    values = lists.flatten()
    is_number = pc.all(pc.match_substring_regex(values, NUMBER)).as_py()
    if is_number and not pc.all(pc.match_substring_regex(values, WHOLE)).as_py():
        lists = lists.cast(pa.large_list(pa.float64()))
    is_single = len(values) == len(lists) - lists.null_count
    return pc.list_element(lists, 0) if is_single else lists


def _plain(array: pa.Array) -> pa.Array:
    """Returns the values without dictionaries and views, for which Arrow lacks many functions."""
    array = without_views(array)
    kind = array.type
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type)
    if _is_list(kind) and pa.types.is_dictionary(kind.value_type):
        return array.cast(pa.list_(kind.value_type.value_type))
    return array


def _is_list(kind: pa.DataType) -> bool:
    """Whether values are lists that Arrow casts right, which it does not of list views."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
