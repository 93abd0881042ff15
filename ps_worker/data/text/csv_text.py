r"""Reader of CSV with a header, one row a line; columns are matched by name.

Fields are separated by what the header has most of: a comma, a tab, ";" or "|".

    click,user,age
    1,alice,31
    0,"smith, bob",

A missing value is empty. A quoted value ends at the next quote that is not doubled. It may contain
separators, but no line break, so that reading can start at any line: such a line is malformed, as is one with
another number of fields. Slot values are bytes and are never decoded; `NULL` is a value like any other.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns, Decoder, shown
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.text_reader import (
    BLOCK_BYTES,
    first_block,
    line_blocks,
    line_number,
    line_splits,
)

# Values of `faults`: a good line, wrong number of fields, unclosed quote, carriage return inside the line.
GOOD, FIELDS, QUOTE, RETURN = range(4)

NO_QUOTE = -1

SEPARATORS = ",\t;|"
_QUOTED = re.compile(r'"[^"]*"')

_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CsvReader(ColumnReader):
    """Reads the columns of a schema by name. Thread-safe."""

    def __init__(
        self, schema: Schema, bad_rows: BadRows, *, header: Sequence[str] | None = None
    ) -> None:
        """Takes the columns to read; others are ignored.

        `header` names all columns of files without one, whose values are separated by tabs and never quoted.
        """
        super().__init__(schema, bad_rows)
        self._header = header

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return line_splits(path, num_splits)

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        path, blocks = split.path, line_blocks(split, offset)
        first = next(blocks, None)
        if first is None:
            return
        names, separator, header_bytes = self._names(path)
        quote = '"' if self._header is None else ""
        fields = pa.schema([(name, pa.binary()) for name in names])
        place = partial(line_number, path)
        decoder = Decoder(path, fields, self._schema, self._bad_rows, place)
        options = _options(names, separator, quote, decoder.columns.stored)
        reasons = {
            QUOTE: "a quote is not closed; values with line breaks are not supported",
            FIELDS: f"not {len(names)} fields separated by {separator!r}, as in the header",
            RETURN: "a carriage return inside the line",
        }
        for block, position in chain([first], blocks):
            if position == 0:
                block, position = block[header_bytes:], header_bytes  # noqa: PLW2901
            num_lines = int(np.count_nonzero(block == _NEWLINE))
            starts, faults = np.empty(num_lines + 1, np.int64), np.empty(num_lines, np.uint8)
            quote_byte = ord(quote) if quote else NO_QUOTE
            scan_lines(block, ord(separator), quote_byte, len(names), starts, faults)
            is_good = faults == GOOD
            for line in np.flatnonzero(~is_good):
                text = block[starts[line] : starts[line + 1]].tobytes().rstrip(b"\r\n")
                fault = f"{reasons[int(faults[line])]}: {shown(text)}"
                self._bad_rows.add(path, partial(place, int(position + starts[line])), fault)
            if not is_good.all():
                block = block[np.repeat(is_good, np.diff(starts))]  # noqa: PLW2901
            if len(block):
                table = arrow_csv.read_csv(pa.py_buffer(block), *options)
                rows = table.combine_chunks().to_batches()[0]
                yield decoder.decode(rows, position + starts[:-1][is_good])

    def fields(self, path: str) -> pa.Schema:
        return pa.schema([(name, pa.binary()) for name in self._names(path)[0]])

    def _names(self, path: str) -> tuple[list[str], str, int]:
        """Returns the names, their separator and the bytes of their line."""
        if self._header is not None:
            return list(self._header), "\t", 0
        line = first_block(path).tobytes().partition(b"\n")[0]
        try:
            names = line.removeprefix(BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:1: the header is {shown(line)}, which is not UTF-8") from error
        separator = separator_of(names)
        try:
            fields = next(csv.reader([names], delimiter=separator), [])
        except csv.Error as error:  # a carriage return inside the line, a name of over 128 KiB
            raise DataError(f"{path}:1: the header is {shown(line)}: {error}") from error
        return fields, separator, len(line) + 1


def separator_of(header: str) -> str:
    """Returns what a header has most of, outside quotes; a comma without any."""
    bare = _QUOTED.sub("", header)
    return max(SEPARATORS, key=bare.count)


def _options(
    names: list[str], separator: str, quote: str, read: list[str]
) -> tuple[arrow_csv.ReadOptions, arrow_csv.ParseOptions, arrow_csv.ConvertOptions]:
    return (
        arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=BLOCK_BYTES),
        arrow_csv.ParseOptions(
            delimiter=separator, quote_char=quote or False, ignore_empty_lines=False
        ),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(read, pa.binary()),
            include_columns=read,
            null_values=[""],
            strings_can_be_null=True,
            check_utf8=False,
        ),
    )


@kernel
def skip_quoted(block: NDArray[np.uint8], position: int, quote: int) -> tuple[bool, int]:
    """Returns whether the quote opened at `position` is closed on the line, and the position after it."""
    position += 1
    while block[position] != _NEWLINE:
        if block[position] == quote:
            if block[position + 1] != quote:
                return True, position + 1
            position += 1
        position += 1
    return False, position


@kernel
def scan_line(
    block: NDArray[np.uint8], position: int, separator: int, quote: int, num_fields: int
) -> tuple[int, int]:
    """Returns the fault of the line at `position`, or GOOD, and the start of the next line."""
    num_separators = 0
    fault = GOOD
    is_start = True  # of a field
    while block[position] != _NEWLINE:
        if is_start and block[position] == quote:
            is_start = False
            is_closed, position = skip_quoted(block, position, quote)
            if not is_closed:
                fault = QUOTE
            continue
        if block[position] == _RETURN and block[position + 1] != _NEWLINE:
            fault = RETURN
        is_start = block[position] == separator
        num_separators += is_start
        position += 1
    if fault == GOOD and num_separators + 1 != num_fields:
        fault = FIELDS
    return fault, position + 1


@kernel
def scan_lines(
    block: NDArray[np.uint8],
    separator: int,
    quote: int,
    num_fields: int,
    starts: NDArray[np.int64],
    faults: NDArray[np.uint8],
) -> None:
    """Overwrites `starts` int64[lines + 1], and the block's end, and `faults` uint8[lines] of whole lines."""
    position = 0
    for line in range(faults.size):
        starts[line] = position
        faults[line], position = scan_line(block, position, separator, quote, num_fields)
    starts[faults.size] = position
