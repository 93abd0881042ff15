r"""Reader of CSV with a header, one row a line; columns are matched by name.

    click,user,age
    1,alice,31
    0,"smith, bob",

A missing value is empty. A quoted value may contain separators and doubled quotes, but no line break: such a
line is malformed, as is one with another number of fields. Slot values are bytes and are never decoded;
`NULL` is a value like any other.
"""

import csv
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_matching import FileColumns, match_columns
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder, shown
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.csv_scanner import FIELDS, GOOD, NO_QUOTE, QUOTE, scan_lines
from ctr_ps.ps_worker.data.text.line_blocks import (
    BLOCK_BYTES,
    line_blocks,
    line_splits,
    lines_before,
)

_NEWLINE = ord("\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """Separator and quote, one byte each; without a quote there are no quoted values."""

    separator: str = ","
    quote: str | None = '"'


class CsvReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def __init__(
        self,
        schema: Schema,
        bad_rows: BadRows,
        *,
        dialect: CsvDialect = CsvDialect(),
        header: Sequence[str] | None = None,
    ) -> None:
        """Takes the columns to read; others are ignored. `header` names all columns of files without one."""
        super().__init__(schema, bad_rows)
        self._dialect = dialect
        self._header = header

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return line_splits(path, num_splits)

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        text: _Text | None = None
        for block, position in line_blocks(split, offset):
            if text is None:
                names, length = self._names(split.path)
                text = _Text(split.path, names, self._dialect, self._schema, self._bad_rows)
            if position == 0 and length:
                block, position = block[length:], length  # noqa: PLW2901
            if len(block) and (columns := text.columns(block, position)) is not None:
                yield columns

    def names(self, path: str) -> list[str]:
        """Returns the names of a file's columns; DataError for an unreadable file or header."""
        return self._names(path)[0]

    def _names(self, path: str) -> tuple[list[str], int]:
        if self._header is not None:
            return list(self._header), 0
        with closing(line_blocks(FileSplit(path))) as blocks:
            block, _ = next(blocks, (np.empty(0, np.uint8), 0))
            line = block.tobytes().partition(b"\n")[0]
        try:
            names = line.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:1: the header is {shown(line)}, which is not UTF-8") from error
        try:
            fields = next(csv.reader([names], delimiter=self._dialect.separator), [])
        except csv.Error as error:  # a carriage return inside the line, a name of over 128 KiB
            raise DataError(f"{path}:1: the header is {shown(line)}: {error}") from error
        return fields, len(line) + 1


class _Text:
    """One pass over a split. For one thread."""

    def __init__(
        self, path: str, names: list[str], dialect: CsvDialect, schema: Schema, bad_rows: BadRows
    ) -> None:
        self._path = path
        self._names = names
        self._dialect = dialect
        self._bad_rows = bad_rows
        fields = pa.schema([(name, pa.binary()) for name in names])
        columns = match_columns(path, fields, schema)
        self._decoder = Decoder(path, schema, columns, bad_rows, self._place)
        self._options = _options(names, columns, dialect)

    def columns(self, block: NDArray[np.uint8], position: int) -> Columns | None:
        """Returns the rows in a block of lines at offset `position`; None without rows."""
        num_lines = int(np.count_nonzero(block == _NEWLINE))
        starts, faults = np.empty(num_lines + 1, np.int64), np.empty(num_lines, np.uint8)
        quote = NO_QUOTE if self._dialect.quote is None else ord(self._dialect.quote)
        scan_lines(block, ord(self._dialect.separator), quote, len(self._names), starts, faults)
        is_good = faults == GOOD
        for line in np.flatnonzero(~is_good):
            text = block[starts[line] : starts[line + 1]].tobytes()
            self._count(int(position + starts[line]), int(faults[line]), text)
        if not is_good.all():
            block = block[np.repeat(is_good, np.diff(starts))]
        if not len(block):
            return None
        return self._decoder.decode(self._parsed(block), position + starts[:-1][is_good])

    def _parsed(self, block: NDArray[np.uint8]) -> pa.RecordBatch:
        table = arrow_csv.read_csv(pa.py_buffer(block), *self._options)
        return table.combine_chunks().to_batches()[0]

    def _count(self, offset: int, fault: int, text: bytes) -> None:
        line = text.rstrip(b"\r\n")
        if fault == QUOTE:
            reason = "a quote is not closed; values with line breaks are not supported"
        elif fault == FIELDS:
            separator = self._dialect.separator
            reason = f"not {len(self._names)} fields separated by {separator!r} as in the header"
        else:
            reason = "a carriage return inside the line"
        place = self._place(offset) if self._bad_rows.is_shown else ""
        self._bad_rows.add(self._path, place, f"{reason}: {shown(line)}")

    def _place(self, offset: int) -> str:
        return str(lines_before(self._path, offset) + 1)


def _options(
    names: list[str], columns: FileColumns, dialect: CsvDialect
) -> tuple[arrow_csv.ReadOptions, arrow_csv.ParseOptions, arrow_csv.ConvertOptions]:
    """Returns options that parse rows without a header to binary columns."""
    return (
        arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=BLOCK_BYTES),
        arrow_csv.ParseOptions(
            delimiter=dialect.separator, quote_char=dialect.quote or False, ignore_empty_lines=False
        ),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(columns.names, pa.binary()),
            include_columns=columns.names,
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )
