"""Splitting of the rows of files into training, validation and test sets.

    FOLDER/train/part-00000.tsv ...    FOLDER/validation/part-00000.tsv ...    FOLDER/test/...

The set of a row is determined by a hash of the seed and its number over all files. The sizes of the sets have
the given ratio in expectation.
"""

import contextlib
import csv
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ctr_ps.protos.errors import DataError, UsageError, did_you_mean
from ctr_ps.ps_worker.data.columnar.column_values import (
    NUMBER,
    flat,
    is_number_type,
    is_text_type,
    numbers,
    without_views,
)
from ctr_ps.ps_worker.data.columnar.parquet_orc import COLUMNAR
from ctr_ps.ps_worker.data.files.content import errors_of_writing, open_to_write, temporary_path
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import NAMED, SUFFIXES, format_of, require_format
from ctr_ps.ps_worker.data.negative_sampling import write_row_hashes
from ctr_ps.ps_worker.data.text.csv_text import BYTE_ORDER_MARK, separator_of
from ctr_ps.ps_worker.data.text.text_reader import first_block, line_blocks

logger = logging.getLogger(__name__)

SETS = ("train", "validation", "test")
ROWS_PER_FILE = 1_000_000

_NEWLINE = np.uint8(ord("\n"))
_TABLE_ROWS = 1 << 18  # read at once, and dealt to row groups
_NO_SET = -1
_OWN_NAME = re.compile(r"part-\d{5}\..+")


_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    ">=": pc.greater_equal,
    "<=": pc.less_equal,
    "!=": pc.not_equal,
    "==": pc.equal,
    ">": pc.greater,
    "<": pc.less,
}
_FORM = re.compile(rf"""\s*(.+?)\s*({"|".join(_COMPARE)})\s*(["']?)(.*?)\3\s*""")
_WITH_OFFSET = re.compile(r".*:.*(Z|[+-][\d:]+)")


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a value compares so with another: as numbers, times or bytes of text; a missing one does not.

    Text is compared as numbers if `value` is one; other text then differs from it, and fulfils only `!=`.
    Times without an offset are in the zone of the column.
    """

    column: str
    operator: str  # a key of `_COMPARE`
    value: str

    def __post_init__(self) -> None:
        if self.operator not in ("==", "!=") and re.match(r"\d{4}-\d\d-\d\d", self.value):
            try:
                date.fromisoformat(self.value[:10])
            except ValueError as error:
                raise UsageError(f"{self.value!r} is no date: {error}") from error

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the condition in a text; raises UsageError."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"--where is {text!r}, expected a column, one of {' '.join(_COMPARE)}, and a value, as in "
                "'clicks > 0'"
            )
        return cls(found[1], found[2], found[4])

    def rows(self, array: pa.Array) -> NDArray[np.bool_]:
        """Returns whether each value fulfils it, bool[N]; UsageError if the value is of another type."""
        array = without_views(array)
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        kind = array.type
        if array.null_count == len(array):
            return np.zeros(len(array), np.bool_)
        is_text, other = is_text_type(kind), pa.scalar(self.value)
        try:
            if pa.types.is_timestamp(kind) and kind.tz:
                has_offset = _WITH_OFFSET.fullmatch(self.value)
                other = other.cast(kind if has_offset else pa.timestamp(kind.unit))
                if not has_offset:
                    other = pc.assume_timezone(other, kind.tz, ambiguous="earliest")
            elif is_text and not re.fullmatch(NUMBER, self.value):
                array, other = array.cast(pa.large_binary()), other.cast(pa.large_binary())
            elif is_text or is_number_type(kind):
                values = self._order(array, numbers(array))
                is_odd = is_text & (self.operator != "!=") & np.isinf(values)
                array = pa.array(values, mask=np.isnan(values) | is_odd)
                other = pa.scalar(float(self.value))
            else:
                other = other.cast(kind)
        except (pa.ArrowException, ValueError) as error:
            raise UsageError(
                f"column {self.column!r} is of type {kind}, which is not comparable with {self.value!r}"
            ) from error
        fulfil = pc.fill_null(_COMPARE[self.operator](array, other), False)
        rows: NDArray[np.bool_] = fulfil.to_numpy(zero_copy_only=False)
        return rows

    def _order(self, array: pa.Array, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns `values`, in whose place other numbers are that compare with the float of `value` exactly.

        Rounding keeps the order, so only what rounds to the same number as `value` is compared again.
        """
        rounded = float(self.value)
        if not 2**53 <= abs(rounded) < np.inf or pa.types.is_floating(array.type):
            return values
        exact, towards = Decimal(self.value), {-1: -np.inf, 0: rounded, 1: np.inf}
        ties = np.flatnonzero(values == rounded)
        texts = array.take(pa.array(ties)).cast(pa.string()).to_pylist()
        places = [towards[int(Decimal(text).compare(exact))] for text in texts]
        values = values.copy()
        values[ties] = np.nextafter(rounded, places)
        return values


@dataclass(frozen=True, slots=True)
class WrittenSet:
    """One of the sets: its name, the rows of all its files, and the files in the order of the rows."""

    name: str
    rows: int
    files: tuple[Path, ...]


def split_rows(
    # text with one row a line, plain, .gz or .zst, CSV with its header; or Parquet and ORC, whose
    # sets are Parquet. All of one kind; their order matters
    files: Sequence[str],
    folder: Path,  # created if it does not exist
    *,
    # sizes of train and validation, or train, validation and test; None: (9, 1), if `by` is None
    ratio: Sequence[int] | None = None,
    seed: int = 1,  # of the hash
    rows_per_file: int = ROWS_PER_FILE,  # rows of all files of a set but the last
    suffix: str = "",  # of the sets' files, as ".tsv.zst"; "": that of the format
    format: str | None = None,  # of `files`; None: determined by the suffix
    # by what rows belong to a set "test", the others to "train", in files that name their columns;
    # None: by ratio and hash
    by: Condition | None = None,
    where: Sequence[Condition] = (),  # what the rows of all sets fulfil
) -> list[WrittenSet]:
    """Writes the sets, which replace those of an earlier call once all files are complete.

    Raises:
        UsageError: If suffix, format or a condition are invalid, or a set's folder has files that this
            function did not write.
        DataError: If a file cannot be read, files have different columns, or a set would be empty.
    """
    if by is not None and ratio is not None:
        raise UsageError(
            f"--by chooses the test set by column {by.column!r}, and --ratio by a hash: give one of them"
        )
    ratio = ratio or (9, 1)
    if format:
        require_format(format)
    kinds = {path: format or format_of(path) for path in files}
    suffix = suffix or _suffix_for(files[0], kinds[files[0]])
    if not suffix.startswith(".") or PurePath(f"part{suffix}").name != f"part{suffix}":
        raise UsageError(f"suffix is {suffix!r}, expected a suffix such as .tsv.gz")
    names = ("train", "test") if by else SETS[: len(ratio)]
    folders = [folder / name for name in SETS]  # also those of an earlier call
    for path, kind in kinds.items():
        _require_same_format(path, kind, suffix)
        if Path(path).resolve().parent in [each.resolve() for each in folders]:
            raise UsageError(
                f"{path!r} is in {Path(path).parent}, where this split writes, but is an input: choose "
                "another output folder"
            )
    for each in folders:
        for found in sorted(each.glob("part-*")):
            if not _OWN_NAME.fullmatch(found.name):  # it would join the set
                raise UsageError(
                    f"{str(found)!r} would be read as a file of the set {each.name!r}: choose another folder"
                )
    with errors_of_writing(folder), ExitStack() as stack:
        writers = [
            stack.enter_context(_SetWriter(folder / name, rows_per_file, suffix)) for name in names
        ]
        try:
            _deal(kinds, seed, _limits(ratio), writers, by, where)
        except pa.ArrowException as error:
            raise DataError(
                f"cannot write the rows of {files[0]!r} as Parquet, or compare them: {error}"
            ) from error
        num_rows = sum(writer.rows for writer in writers)
        for writer in writers:
            if writer.rows == 0:
                raise DataError(
                    f"the set {writer.folder.name!r} would be empty, as {num_rows} rows are too few: "
                    "use more rows, or another ratio or condition"
                )
        for name in set(SETS).difference(names):
            stack.enter_context(_SetWriter(folder / name, rows_per_file, suffix)).finish()
        return [WrittenSet(writer.folder.name, writer.rows, writer.finish()) for writer in writers]


def parse_ratio(text: str) -> tuple[int, ...]:
    """Returns the two or three numbers of a ratio such as "9:1"; raises UsageError if it is none."""
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*){1,2}", text, re.ASCII):
        raise UsageError(
            f"ratio is {text!r}, expected two or three whole numbers of at least 1, as in 9:1"
        )
    return tuple(map(int, text.split(":")))


def _suffix_for(path: str, kind: str) -> str:
    own = [suffix for suffix, name in SUFFIXES.items() if name == kind]
    own.sort(key=lambda suffix: suffix not in path)
    return ".parquet" if kind in COLUMNAR else own[0]


def _require_same_format(path: str, kind: str, suffix: str) -> None:
    kind_out = format_of(f"part{suffix}")
    if kind_out != "parquet" if kind in COLUMNAR else kind != kind_out:
        raise UsageError(
            f"suffix is {suffix!r}, the suffix of {kind_out} files, but {path!r} is {kind}: choose another "
            f"suffix"
        )


def _limits(ratio: Sequence[int]) -> NDArray[np.uint64]:
    """Returns the first hash of each set except the first."""
    starts = np.cumsum(ratio)[:-1].tolist()
    return np.array([(start << 64) // sum(ratio) for start in starts], np.uint64)


def _sets_of_rows(
    seed: int, first_row: int, num_rows: int, limits: NDArray[np.uint64]
) -> NDArray[np.int8]:
    """Returns the number of the set of each row, int8[num_rows]."""
    hashes = np.empty(num_rows, np.uint64)
    write_row_hashes(seed, first_row, hashes)
    return np.searchsorted(limits, hashes, side="right").astype(np.int8)


def _deal(
    files: Mapping[str, str],
    seed: int,
    limits: NDArray[np.uint64],
    writers: Sequence["_SetWriter"],
    by: Condition | None,
    where: Sequence[Condition],
) -> None:
    first_row = 0
    fields: pa.Schema | None = None
    first, *_ = files
    header = _header_of(first, files[first])
    for writer in writers:
        writer.header = header
    for path, kind in files.items():
        if _header_of(path, kind) != header:
            raise DataError(
                f"{path}: its header differs from that of {first}: split them separately"
            )
        row_before = first_row
        for rows in _tables(path, kind) if kind in COLUMNAR else _lines(path, len(header)):
            fields = fields or rows.schema
            if not rows.schema.equals(fields):
                raise DataError(
                    f"{path}: its columns differ from those of {first}: split them separately"
                )
            sets = _sets_of_rows(seed, first_row, len(rows), limits)
            column = partial(_column, path, kind, header, rows, first_row - row_before)
            if by is not None:
                sets = by.rows(column(by.column)).astype(np.int8)
            for each in where:
                sets[~each.rows(column(each.column))] = _NO_SET
            first_row += len(rows)
            for number, writer in enumerate(writers):
                writer.write(rows.filter(pa.array(sets == number)))
        if first_row == row_before:
            logger.warning("a file has no rows: file=%s", path)


def _column(path: str, kind: str, header: bytes, rows: pa.Table, first: int, name: str) -> pa.Array:
    """Returns a column of rows; of CSV and JSON its texts, null where there is none."""
    if kind not in NAMED:
        raise UsageError(
            f"{path}: files of format {kind!r} have no column {name!r} to choose rows by"
        )
    if kind == "paddlerec":
        start = f"{name}:".encode()
        words = [line.split() for line in rows["line"].to_pylist()]
        found = [
            next((w[len(start) :] for w in line if w.startswith(start)), b"") for line in words
        ]
        return pa.array([value or None for value in found], pa.binary())
    if kind == "json":
        values = [_value_in_json(line, name) for line in rows["line"].to_pylist()]
        if any(isinstance(each, list | dict) for each in values):
            raise UsageError(f"{path}: column {name!r} has lists or objects, which do not compare")
        if any(isinstance(each, str) for each in values):
            # As numbers are compared with them, 1 and 0 here, too.
            texts = [str(int(each)) if isinstance(each, bool) else each for each in values]
            texts = [each and each.encode(errors="replace") for each in texts]
            return pa.array(texts, pa.binary())
        return pa.array(values, pa.bool_())
    if kind == "csv":
        names, *cells = _cells(path, header.removeprefix(BYTE_ORDER_MARK), rows, first)
        names = [each.encode("latin-1").decode(errors="replace") for each in names]
    else:
        table = flat(rows)
        names = table.column_names
    if name not in names:
        raise UsageError(f"{path}: no column {name!r}{did_you_mean(name, names)}")
    place = names.index(name)
    if kind != "csv":
        return table.column(place).combine_chunks()
    texts = [row[place].encode("latin-1") or None if place < len(row) else None for row in cells]
    return pa.array(texts, pa.binary())


def _value_in_json(line: bytes, name: str) -> Any:
    """Returns the value of a dotted name, numbers as they are written; None where there is none."""
    try:
        value = json.loads(line, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return None
    for key in [name] if isinstance(value, dict) and name in value else name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cells(path: str, header: bytes, rows: pa.Table, first: int) -> tuple[list[str], ...]:
    """Returns names and cells of CSV, row by row; `first` rows of the file are before them."""
    separator = separator_of(header.decode("latin-1"))
    found = list[list[str]]()
    for line in (header, *rows["line"].to_pylist()):
        reader = csv.reader([line.decode("latin-1")], delimiter=separator)
        try:
            found.append(next(reader, [""]))
        except csv.Error as error:
            raise DataError(f"{path}:{first + len(found) + 1}: not CSV: {error}") from error
    return tuple(found)


def _header_of(path: str, kind: str) -> bytes:
    """Returns the first line of a CSV file, with its line break; empty in other formats."""
    if kind != "csv":
        return b""
    line, end, _ = first_block(path).tobytes().partition(b"\n")
    return line + end


def _lines(path: str, header_bytes: int) -> Iterator[pa.Table]:
    """Yields the lines behind the header of a file of text, as one column with their line breaks."""
    for block, position in line_blocks(FileSplit(path)):
        content = block[header_bytes:] if position == 0 else block
        if len(content):
            ends = np.flatnonzero(content == _NEWLINE) + 1
            buffers = [None, pa.py_buffer(np.concatenate([[0], ends])), pa.py_buffer(content)]
            lines = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), buffers)
            yield pa.table({"line": lines})


def _tables(path: str, kind: str) -> Iterator[pa.Table]:
    with COLUMNAR[kind].open(path) as file:
        for batch in file.batches(range(len(file.sizes)), _TABLE_ROWS):
            columns = [without_views(column) for column in batch.columns]
            fields = map(pa.Field.with_type, batch.schema, [each.type for each in columns])
            yield pa.Table.from_arrays(columns, schema=pa.schema(fields, batch.schema.metadata))


class _SetWriter:
    """Writes one set to temporary files, which `finish` renames; without it they are removed.

    A file of text begins with the `header`.
    """

    def __init__(self, folder: Path, rows_per_file: int, suffix: str) -> None:
        self.folder = folder
        self.rows = 0
        self.header = b""
        self._tables: pq.ParquetWriter | None = None
        self._rows_per_file = rows_per_file
        self._suffix = suffix
        self._paths: list[Path] = []
        self._file: BinaryIO | None = None
        self._made = [each for each in folder.parents if not each.exists()]

    def __enter__(self) -> "_SetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        for path in self._paths:
            temporary_path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not there, or has files
            for each in (self.folder, *self._made):
                each.rmdir()

    def write(self, rows: pa.Table) -> None:
        while len(rows):
            room = self._rows_per_file - self.rows % self._rows_per_file
            if self._file is None or room == self._rows_per_file:
                self._next_file(rows.schema)
            self._put(rows[:room])
            self.rows += min(room, len(rows))
            rows = rows[room:]

    def finish(self) -> tuple[Path, ...]:
        """Replaces the files of an earlier call, and returns the new ones."""
        self._close()
        for stale in self.folder.glob("part-*"):
            stale.unlink()
        for path in self._paths:
            temporary_path(path).replace(path)
        return tuple(self._paths)

    def _next_file(self, fields: pa.Schema) -> None:
        self._close()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._paths.append(self.folder / f"part-{len(self._paths):05d}{self._suffix}")
        self._file = open_to_write(temporary_path(self._paths[-1]))
        if self._suffix == ".parquet":
            self._tables = pq.ParquetWriter(self._file, fields)
        else:
            self._file.write(self.header)

    def _put(self, rows: pa.Table) -> None:
        assert self._file is not None
        if self._tables is not None:
            self._tables.write_table(rows)
            return
        for lines in rows.column(0).chunks:
            _, bounds, content = lines.buffers()
            places = np.frombuffer(bounds, np.int64, len(lines) + 1, lines.offset * 8)
            self._file.write(content[places[0] : places[-1]])

    def _close(self) -> None:
        if self._tables is not None:
            self._tables.close()
            self._tables = None
        if self._file is not None:
            self._file.close()
            self._file = None
