"""The scanner kernels against rows parsed by Python."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.ps_worker.data.text.criteo import (
    COLUMN,
    LINE,
    START,
    STOP,
    parse_number,
    scan_rows,
)
from tests.reference import criteo as reference

SCHEMA = Schema(dense=(DenseColumn(name="x"), DenseColumn(name="y")), slots=("u", "v", "w"))

labels = st.sampled_from([b"0", b"1"])
numbers = st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n) | st.just(b"")
values = st.text("09afAF é-\r", max_size=17).map(str.encode)
good_rows = st.tuples(labels, numbers, numbers, values, values, values).map(b"\t".join)
any_rows = st.lists(st.text("01-\tx\r", max_size=4).map(str.encode), max_size=8).map(b"\t".join)
lines = st.lists(good_rows | any_rows, max_size=12)


class Columns:
    def __init__(self, num_rows: int, num_malformed: int = 16) -> None:
        self.starts = np.full(num_rows, -1, np.int64)
        self.labels = np.full(num_rows, -1, np.float32)
        self.numbers = np.full((num_rows, 2), -1, np.float64)
        self.keys = np.zeros((num_rows, 3), np.uint64)
        self.malformed = np.full((num_malformed, 4), -1, np.int64)

    def scan(self, content: bytes, position: int = 0, has_label: bool = True) -> list[int]:
        block = np.frombuffer(bytearray(content), np.uint8)
        return list(
            scan_rows(
                block,
                position,
                has_label,
                np.arange(1, 4),
                self.starts,
                self.labels,
                self.numbers,
                self.keys,
                self.malformed,
            )
        )


def number_of(text: bytes) -> tuple[float, bool]:
    block = np.frombuffer(bytearray(b"9" + text + b"9"), np.uint8)
    return parse_number(block, 1, 1 + len(text))


@settings(deadline=None)
@given(lines=lines)
def test_columns_equal_rows_parsed_by_python(lines: list[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    columns = Columns(16)

    position, num_rows, num_malformed = columns.scan(content)

    parsed = [reference.parse_row(line, SCHEMA) for line in lines]
    rows = [row for row in parsed if row is not None]
    assert position == len(content)
    assert [label for label, _, _ in rows] == columns.labels[:num_rows].tolist()
    numbers = np.nan_to_num(columns.numbers[:num_rows], nan=0.0)
    assert [dense for _, dense, _ in rows] == numbers.tolist()
    assert [keys for _, _, keys in rows] == columns.keys[:num_rows].tolist()
    all_starts = itertools.accumulate((len(line) + 1 for line in lines), initial=0)
    is_good = [row is not None for row in parsed]
    assert list(itertools.compress(all_starts, is_good)) == columns.starts[:num_rows].tolist()
    malformed = columns.malformed[:num_malformed]
    assert [n for n, row in enumerate(parsed) if row is None] == malformed[:, LINE].tolist()
    assert [lines[n] for n in malformed[:, LINE]] == [
        content[start:stop] for start, stop in malformed[:, [START, STOP]]
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"0", 0.0),
        (b"-2", -2.0),
        (b"007", 7.0),
        (b"9223372036854775807", 2.0**63),
        (b"-9223372036854775808", -(2.0**63)),
    ],
)
def test_integer_is_parsed(text: bytes, number: float) -> None:
    assert number_of(text) == (number, True)


def test_empty_number_is_nan() -> None:
    number, is_valid = number_of(b"")

    assert math.isnan(number)
    assert is_valid


@pytest.mark.parametrize(
    "text",
    [
        b"-", b"+1", b"1.5", b" 1", b"1 ", b"1e3", b"--1", b"1-", b"/", b":", b"\0", b"\xff",
        b"9223372036854775808", b"-9223372036854775809", b"99999999999999999999",
    ],
)  # fmt: skip
def test_what_is_no_integer_of_64_bits_is_refused(text: bytes) -> None:
    assert not number_of(text)[1]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (b"", 1),
        (b"2\t1\t2\ta\tb\tc", 1),
        (b"01\t1\t2\ta\tb\tc", 1),
        (b"\t1\t2\ta\tb\tc", 1),
        (b"1", 1),
        (b"1\tx\t2\ta\tb\tc", 2),
        (b"1\t1\t2.0\ta\tb\tc", 3),
        (b"1\t1\t2", 3),
        (b"1\t1\t2\ta\tb", 5),
        (b"1\t1\t2\ta\tb\tc\td", 6),
        (b"1\t1\t2\ta\tb\tc\t", 6),
    ],
)
def test_column_at_fault_is_reported(row: bytes, column: int) -> None:
    columns = Columns(4)
    content = row + b"\n0\t\t\t\t\t\n"

    result = columns.scan(content)

    assert result == [len(content), 1, 1]
    assert columns.malformed[0, [LINE, START, STOP, COLUMN]].tolist() == [0, 0, len(row), column]
    assert columns.labels[0] == 0.0


def test_carriage_return_before_the_newline_is_no_part_of_the_value() -> None:
    columns = Columns(2)

    columns.scan(b"1\t1\t2\ta\tb\tc\r\n1\t1\t2\ta\tb\t\r\n")

    assert columns.keys[:, 2].tolist() == [key_of(3, "c"), key_of(3, "")]


def test_row_without_label_begins_with_its_first_number() -> None:
    columns = Columns(2)
    content = b"5\t\ta\tb\tc\n"

    result = columns.scan(content, has_label=False)

    assert result == [len(content), 1, 0]
    assert columns.labels.tolist() == [-1, -1]
    assert columns.numbers[0, 0] == 5.0
    assert columns.keys[0].tolist() == [key_of(1, "a"), key_of(2, "b"), key_of(3, "c")]


def test_scan_stops_when_the_columns_are_full_and_goes_on_from_there() -> None:
    content = b"".join(b"%d\t%d\t\ta\tb\tc\n" % (n % 2, n) for n in range(5))
    first, second = Columns(3), Columns(3)

    position, num_rows, _ = first.scan(content)
    end, num_more, _ = second.scan(content, position)

    assert (num_rows, num_more, end) == (3, 2, len(content))
    assert first.numbers[:, 0].tolist() + second.numbers[:2, 0].tolist() == [0, 1, 2, 3, 4]


def test_scan_stops_when_no_more_malformed_rows_can_be_reported() -> None:
    columns = Columns(8, num_malformed=2)

    result = columns.scan(b"\n1\t\t\t\t\t\nx\ny\n")

    assert result == [1 + 7 + 2, 1, 2]
    assert columns.malformed[:, LINE].tolist() == [0, 2]
