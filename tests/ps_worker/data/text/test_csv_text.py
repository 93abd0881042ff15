"""What holds for CSV alone: headers, quotes, malformed lines, compression, bytes as they are."""

import logging
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.csv_text import (
    FIELDS,
    GOOD,
    NO_QUOTE,
    QUOTE,
    CsvReader,
    scan_lines,
)
from tests.reference.features import key_of

SCHEMA = Schema(dense=(DenseColumn(name="age"),), slots=("user",))


def write(path: Path, text: bytes) -> str:
    path.write_bytes(text)
    return str(path)


def read(path: str, bad_rows: BadRows | None = None, offset: int | None = None) -> list[Block]:
    return list(CsvReader(SCHEMA, bad_rows or BadRows()).blocks(FileSplit(path), offset))


def users(text: bytes, tmp_path: Path) -> list[int]:
    return [
        key for block in read(write(tmp_path / "a.csv", text)) for key in block.rows.keys.tolist()
    ]


def keys_of(*values: bytes) -> list[int]:
    return [key_of(1, value) for value in values]


@pytest.mark.parametrize(
    "text",
    [
        b"age,user\n1,a\n2,b\n",
        b"age,user\n1,a\n2,b",
        b"age,user\r\n1,a\r\n2,b\r\n",
        b"\xef\xbb\xbfage,user\n1,a\n2,b\n",
        b'"age","user"\n"1","a"\n2,"b"\n',
        b'x,user,"y,z",age\n,a,"p,q",1\n,b,,2\n',
        b'age;user;"a,b,c,d"\n1;"a";"x;y,z"\n2;b;\n',
        b"age\tuser\n1\ta\n2\tb\n",
        b"age|user\n1|a\n2|b\n",
    ],
    ids=["plain", "no-end", "crlf", "byte-order-mark", "quoted", "more-columns", ";", "tab", "|"],
)
def test_header_names_the_columns(tmp_path: Path, text: bytes) -> None:
    blocks = read(write(tmp_path / "a.csv", text))

    assert [block.rows.labels for block in blocks] == [None] * len(blocks)
    assert np.concatenate([block.rows.dense[:, 0] for block in blocks]).tolist() == [1, 2]
    assert np.concatenate([block.rows.keys for block in blocks]).tolist() == keys_of(b"a", b"b")


def test_values_are_bytes_and_no_word_means_missing(tmp_path: Path) -> None:
    text = b'age,user\n1,\xff\xfe\n1,NULL\n1,nan\n1,\n1,""\n1,"a ""b"""\n1, a\n1,a\x00\n1,5" x\n'

    assert users(text, tmp_path) == keys_of(
        b"\xff\xfe", b"NULL", b"nan", b"", b"", b'a "b"', b" a", b"a\x00", b'5" x'
    )


def test_missing_number_is_empty_or_nan(tmp_path: Path) -> None:
    (block,) = read(write(tmp_path / "a.csv", b'age,user\n,a\nnan,a\n"",a\n-2.5e1,a\n'))

    assert block.rows.dense[:, 0].tolist() == [0, 0, 0, -25]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"1", "not 2 fields separated by ',', as in the header: '1'"),
        (b"1,a,b", "not 2 fields separated by ',', as in the header: '1,a,b'"),
        (b"", "not 2 fields separated by ',', as in the header: ''"),
        (b'1,"a', "a quote is not closed; values with line breaks .*: '1,\"a'"),
        (b"1,a\rb", r"a carriage return inside the line: '1,a\\rb'"),
        (b"x,a", "column 'age' is 'x', expected a finite number"),
        (b"\xff,a", r"column 'age' is '\\\\xff', expected a finite number"),
        (b"1" * 99 + b"x,a", r"column 'age' is '1{50,}\.\.\., expected"),
    ],
)
def test_malformed_line_is_named_and_left_out(
    tmp_path: Path, line: bytes, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = b"age,user\n1,a\n" + line + b"\n3,c\n"
    path = write(tmp_path / "a.csv", text)

    with pytest.raises(BadRowError, match=rf"a\.csv:3: {fault}"):
        read(path)
    with caplog.at_level(logging.WARNING):
        (block,) = read(path, BadRows(1))
    assert block.rows.dense[:, 0].tolist() == [1, 3]
    assert block.rows.keys.tolist() == keys_of(b"a", b"c")
    assert "place=3" in caplog.text


def test_number_of_a_line_counts_from_the_start_of_the_file(tmp_path: Path) -> None:
    lines = [b"age,user\n", *(b"%d,u\n" % row for row in range(100)), b"bad\n", b"x,u\n"]
    path = write(tmp_path / "a.csv", b"".join(lines))
    reader = CsvReader(SCHEMA, BadRows(1))

    with pytest.raises(BadRowError, match=r"a\.csv:103: column 'age'"):
        list(reader.blocks(FileSplit(path, 300)))


def test_offset_is_the_byte_of_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"age,user\nbad\n1,a\n22,b\n")

    (block,) = read(path, BadRows(1))

    assert block.offset == len(b"age,user\nbad\n")
    assert [b.offset for b in read(path, offset=len(b"age,user\nbad\n1,a\n"))] == [17]


@pytest.mark.parametrize(
    ("header", "fault"),
    [(b"age,us\xff", "not UTF-8"), (b"age,us\rer", "new-line"), (b"x" * 2**18, "field limit")],
    ids=["not-text", "carriage-return", "long-name"],
)
def test_header_that_is_no_line_of_names_is_refused(
    tmp_path: Path, header: bytes, fault: str
) -> None:
    path = write(tmp_path / "a.csv", header + b"\n1,a\n")

    with pytest.raises(DataError, match=rf"a\.csv:1: the header is .*{fault}"):
        read(path)


def test_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", b"")) == []


def test_header_may_be_given_and_the_separator_be_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b'"a\t1\nb"\t2\n')
    reader = CsvReader(SCHEMA, BadRows(), header=["user", "age"])

    (block,) = reader.blocks(FileSplit(path))

    assert block.rows.keys.tolist() == keys_of(b'"a', b'b"')
    assert np.array_equal(block.rows.dense[:, 0], [1, 2])
    assert block.offset == 0


def test_file_of_one_column_may_have_empty_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"user\na\n\nb\n")
    reader = CsvReader(Schema(dense=(), slots=("user",)), BadRows())

    (block,) = reader.blocks(FileSplit(path))

    assert block.rows.keys.tolist() == keys_of(b"a", b"", b"b")


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
