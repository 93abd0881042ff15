"""Which lines of separated values are rows, against one regular expression a line and Arrow's own parser."""

import re

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from ctr_ps.ps_worker.data.text.csv_text import FIELDS, GOOD, NO_QUOTE, QUOTE, RETURN, scan_lines

FIELD = re.compile(rb'"(?:[^"]|"")*+"[^,]*|(?!")[^,]*')


def scan(text: bytes, num_fields: int, quote: int = ord('"')) -> tuple[list[int], list[int]]:
    num_lines = text.count(b"\n")
    starts, faults = np.empty(num_lines + 1, np.int64), np.empty(num_lines, np.uint8)
    scan_lines(np.frombuffer(text, np.uint8), ord(","), quote, num_fields, starts, faults)
    return starts.tolist(), faults.tolist()


def fault_of(line: bytes, num_fields: int) -> int:
    position = num_found = 0
    while position <= len(line):
        field = FIELD.match(line, position)
        if field is None:
            return QUOTE
        num_found += 1
        position = field.end() + 1
    return GOOD if num_found == num_fields else FIELDS


def test_line_is_a_row_by_its_fields_quotes_and_end() -> None:
    lines = [
        b"a,b\n",
        b"a\n",
        b"\n",
        b'"a,b",c\r\n',
        b'"a,b\n',
        b'"a""",c\n',
        b'"a"",c\n',
        b"a\rb,c\n",
        b'x"y,z\n',
    ]

    starts, faults = scan(b"".join(lines), 2)

    assert starts == np.cumsum([0, *map(len, lines)]).tolist()
    assert faults == [GOOD, FIELDS, FIELDS, GOOD, QUOTE, GOOD, QUOTE, RETURN, GOOD]


def test_without_a_quote_quotes_are_bytes_like_any_other() -> None:
    _, faults = scan(b'"a,b\n"a,b",c\n', 2, NO_QUOTE)

    assert faults == [GOOD, FIELDS]


@given(st.lists(st.text('a",', max_size=8), max_size=6))
def test_any_lines_are_what_an_expression_says(texts: list[str]) -> None:
    lines = [text.encode() for text in texts]

    _, faults = scan(b"".join(line + b"\n" for line in lines), 2)

    assert faults == [fault_of(line, 2) for line in lines]


@given(st.lists(st.text('a",\r', max_size=8), max_size=6))
def test_arrow_reads_one_row_from_each_good_line(texts: list[str]) -> None:
    text = "".join(line + "\n" for line in texts).encode()
    starts, faults = scan(text, 2)
    lines = [text[a:b] for a, b, f in zip(starts, starts[1:], faults, strict=False) if f == GOOD]
    if not lines:
        return

    table = csv.read_csv(
        pa.py_buffer(b"".join(lines)),
        csv.ReadOptions(column_names=["x", "y"], use_threads=False),
        csv.ParseOptions(ignore_empty_lines=False),
        csv.ConvertOptions(column_types={"x": pa.binary(), "y": pa.binary()}),
    )

    assert table.num_rows == len(lines)
    assert not any(b"\n" in value for column in table.columns for value in column.to_pylist())
