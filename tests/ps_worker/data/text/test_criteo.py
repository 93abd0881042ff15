"""Criteo's layout: rows without labels, malformed rows, splits, and kernels against rows parsed by Python."""

import gzip
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema, criteo_schema
from ctr_ps.protos.errors import BadRowError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, joined
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.criteo import (
    COLUMN,
    LINE,
    START,
    STOP,
    CriteoReader,
    parse_number,
    scan_rows,
)
from ctr_ps.ps_worker.data.text.text_reader import BLOCK_BYTES
from tests.reference import criteo as reference
from tests.support.formats import write_text

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0, missing=-1.0),), slots=("user", "item")
)


def row(number: int) -> str:
    return f"{number % 2}\t{number}\tu{number}\ti{number}\n"


def write(path: Path, text: str) -> str:
    write_text(path, text.encode())
    return str(path)


def blocks_of(split: str | FileSplit, bad_rows: BadRows | None = None) -> list[Block]:
    split = FileSplit(split) if isinstance(split, str) else split
    return list(CriteoReader(SCHEMA, bad_rows or BadRows()).blocks(split))


def read(path: str, bad_row_limit: int = 0) -> Batch:
    return joined([block.rows for block in blocks_of(path, BadRows(bad_row_limit))])


def ages(rows: Batch) -> list[float]:
    return [float(age) * 2.0 + 1.0 for age in rows.dense[:, 0]]


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".tsv.zst"])
def test_rows_are_labels_scaled_numbers_and_one_key_a_slot(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", "1\t7\talice\tbook\n0\t\t\tpen\n")

    (block,) = blocks_of(path)

    rows = block.rows
    assert block.offset == 0
    assert rows.labels is not None
    assert rows.labels.tolist() == [1.0, 0.0]
    assert rows.dense.tolist() == [[3.0], [-1.0]]
    assert rows.keys.tolist() == [
        key_of(1, "alice"), key_of(2, "book"), key_of(1, ""), key_of(2, "pen"),
    ]  # fmt: skip
    assert rows.offsets.tolist() == [0, 1, 2, 3, 4]
    assert (rows.size, rows.num_slots) == (2, 2)
    arrays = (rows.labels, rows.dense, rows.keys, rows.offsets)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "uint64", "int32"]


def test_file_of_many_blocks_is_read_in_order_and_later_blocks_leave_earlier_alone(
    tmp_path: Path,
) -> None:
    num_rows = 120_000
    path = write(tmp_path / "a.tsv", "".join(row(n) for n in range(num_rows)))

    blocks = blocks_of(path)

    assert len(blocks) >= 3
    rows = joined([block.rows for block in blocks])
    assert ages(rows) == list(range(num_rows))
    assert rows.keys[::2].tolist() == [key_of(1, f"u{n}") for n in range(num_rows)]


@pytest.mark.parametrize("content", ["", "bad\nrows\n"])
def test_no_block_is_empty(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "a.tsv", content)

    assert blocks_of(path, BadRows(2)) == []


def test_rows_without_label_give_blocks_without(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "7\talice\tbook\n\t\tpen\n")

    rows = read(path)

    assert rows.labels is None
    assert rows.dense.tolist() == [[3.0], [-1.0]]
    assert rows.keys[:2].tolist() == [key_of(1, "alice"), key_of(2, "book")]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (row(1), "7\talice\tbook\n", r"a\.tsv:2: 3 columns, expected 4 \(with a label\)"),
        ("7\talice\tbook\n" * 2, row(1), r"a\.tsv:3: 4 columns, expected 3 \(without a label\)"),
    ],
)
def test_rows_of_the_other_kind_are_malformed(
    tmp_path: Path, first: str, second: str, message: str
) -> None:
    path = write(tmp_path / "a.tsv", first + second)

    with pytest.raises(BadRowError, match=message):
        read(path)


def test_row_of_another_length_says_nothing_about_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "garbage\n" * 3 + "7\talice\tbook\n")

    rows = read(path, bad_row_limit=3)

    assert rows.labels is None
    assert rows.size == 1


def test_one_row_that_lost_its_label_does_not_cost_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "7\talice\tbook\n" + row(1) * 3)

    rows = read(path, bad_row_limit=1)

    assert rows.labels is not None
    assert rows.size == 3


def test_split_with_rows_of_the_other_kind_alone_has_none(tmp_path: Path) -> None:
    other = "7\talice\tbook\n"
    path = write(tmp_path / "a.tsv", other + row(1) * 3)

    assert list(CriteoReader(SCHEMA, BadRows(1)).blocks(FileSplit(path, 0, len(other)))) == []


@pytest.mark.parametrize("how", ["split", "offset"])
def test_head_of_the_file_decides_about_labels_wherever_reading_begins(
    tmp_path: Path, how: str
) -> None:
    head, other = row(1) * 3, "7\talice\tbook\n"
    path = write(tmp_path / "a.tsv", head + other * 2 + row(1))
    reader = CriteoReader(SCHEMA, BadRows(2))

    (block,) = (
        reader.blocks(FileSplit(path, len(head)))
        if how == "split"
        else reader.blocks(FileSplit(path), len(head))
    )

    assert block.rows.labels is not None
    assert block.rows.size == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"1 column, expected 4 \(with a label\): ''"),
        ("1\t5\tu", "3 columns, expected 4"),
        ("1\t5\tu\ti\tx", "5 columns, expected 4"),
        ("2\t5\tu\ti", "the label is '2', expected 0 or 1"),
        ("1\t5.5\tu\ti", r"column 2 \(age\) is '5\.5', expected a 64-bit integer or nothing"),
        ("1\t" + "9" * 70 + "\tu\ti", r"is '9{60}'\.\.\., expected"),
    ],
)
def test_malformed_row_is_named_by_file_line_and_fault(
    tmp_path: Path, bad: str, message: str
) -> None:
    path = write(tmp_path / "a.tsv", row(1) + row(2) + bad + "\n" + row(3))

    with pytest.raises(BadRowError, match=rf"a\.tsv:3: .*{message}"):
        read(path)


def test_many_malformed_rows_are_all_skipped_and_counted_in_the_numbers_of_lines(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.tsv", row(1) + "x\n" * 300 + row(2) + "y\n")

    rows = read(path, bad_row_limit=301)
    with pytest.raises(BadRowError, match=r"a\.tsv:303: .*'y'"):
        read(path, bad_row_limit=300)

    assert ages(rows) == [1, 2]
    assert rows.labels is not None
    assert rows.labels.tolist() == [1, 0]
    assert rows.keys[::2].tolist() == [key_of(1, "u1"), key_of(1, "u2")]


def test_line_is_exact_in_a_split_and_in_a_later_block(tmp_path: Path) -> None:
    rows = "".join(row(n) for n in range(120_000))
    path = write(tmp_path / "a.tsv", rows + "x\n")
    middle = len(rows) - BLOCK_BYTES - 100

    for split in (FileSplit(path), FileSplit(path, middle)):
        with pytest.raises(BadRowError, match=r"a\.tsv:120001: "):
            blocks_of(split)


def test_real_rows_equal_rows_parsed_by_python() -> None:
    folder = os.environ.get("CTR_SAMPLE_DIR")
    if folder is None and not os.environ.get("CI"):
        pytest.skip("CTR_SAMPLE_DIR names no folder with rows of Criteo")
    path = min(Path(folder or "").glob("*.tsv.gz"))
    schema = criteo_schema()

    rows = next(CriteoReader(schema, BadRows()).blocks(FileSplit(str(path)))).rows

    with gzip.open(path) as file:
        parsed = [reference.parse_row(next(file).rstrip(b"\n"), schema) for _ in range(300)]
    labels, dense, keys = zip(*(row for row in parsed if row is not None), strict=True)
    assert rows.labels is not None
    assert rows.labels[:300].tolist() == list(labels)
    np.testing.assert_allclose(rows.dense[:300], np.array(dense), rtol=1e-6, atol=1e-6)
    assert rows.keys[: 300 * 26].tolist() == [key for row_keys in keys for key in row_keys]


SCANNED = Schema(dense=(DenseColumn(name="x"), DenseColumn(name="y")), slots=("u", "v", "w"))

labels = st.sampled_from([b"0", b"1"])
numbers = st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n) | st.just(b"")
values = st.text("09afAF é-\r", max_size=17).map(str.encode)
good_rows = st.tuples(labels, numbers, numbers, values, values, values).map(b"\t".join)
any_rows = st.lists(st.text("01-\tx\r", max_size=4).map(str.encode), max_size=8).map(b"\t".join)
lines = st.lists(good_rows | any_rows, max_size=12)


class Columns:
    def __init__(self, num_rows: int) -> None:
        self.starts = np.full(num_rows, -1, np.int64)
        self.labels = np.full(num_rows, -1, np.float32)
        self.numbers = np.full((num_rows, 2), -1, np.float64)
        self.keys = np.zeros((num_rows, 3), np.uint64)
        self.malformed = np.full((16, 4), -1, np.int64)

    def scan(self, content: bytes, has_label: bool = True) -> list[int]:
        block = np.frombuffer(bytearray(content), np.uint8)
        return list(
            scan_rows(
                block,
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

    num_rows, num_malformed = columns.scan(content)

    parsed = [reference.parse_row(line, SCANNED) for line in lines]
    rows = [row for row in parsed if row is not None]
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
        (b"", math.nan),
    ],
)
def test_integer_or_nothing_is_parsed(text: bytes, number: float) -> None:
    np.testing.assert_equal(number_of(text), (number, True))


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

    assert result == [1, 1]
    assert columns.malformed[0, [LINE, START, STOP, COLUMN]].tolist() == [0, 0, len(row), column]
    assert columns.labels[0] == 0.0
