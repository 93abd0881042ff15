"""Multi-slot text: any order of columns, any number of values, errors that name the column."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.text.multislot import (
    ColumnOrder,
    MultiSlotScanner,
    Values,
)
from tests.reference import multislot as reference

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0, missing=-1.0), DenseColumn(name="n")),
    slots=("user", "words"),
)
PLAIN = Schema(
    dense=(DenseColumn(name="age", missing=-9.0), DenseColumn(name="n", missing=-9.0)),
    slots=("user", "words"),
)
ORDERS = [
    ("dense_input", "user", "words", "click"),
    ("click", "words", "n", "user", "age"),
]


def scan(text: str | bytes, columns: list[str] | None = None, values: Values = "keys") -> Batch:
    data = text.encode() if isinstance(text, str) else text
    rows, _, bad_lines = MultiSlotScanner(SCHEMA, columns, values).scan(
        np.frombuffer(data, np.uint8)
    )
    assert bad_lines == []
    return rows


def fault(text: str, columns: list[str] | None = None, values: Values = "keys") -> str:
    block = np.frombuffer(f"2 1 2 0 0 1 1\n{text}\n".encode(), np.uint8)
    _, _, (bad,) = MultiSlotScanner(SCHEMA, columns, values).scan(block)
    assert (bad.index, bad.start) == (1, 14)
    return bad.fault


def slots_of(rows: Batch) -> list[list[int]]:
    bounds = rows.offsets.tolist()
    return [rows.keys[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]


def test_line_has_all_numbers_the_slots_and_the_label() -> None:
    rows = scan("2 5 0.5 1 7 3 12 9 18446744073709551615 1 1\n2 nan -2e1 0 1 4 1 0\n")

    assert rows.labels is not None
    assert rows.labels.tolist() == [1.0, 0.0]
    assert rows.dense.tolist() == [[2.0, 0.5], [-1.0, -20.0]]
    assert slots_of(rows) == [[7], [12, 9, 2**64 - 1], [], [4]]
    arrays = (rows.labels, rows.dense, rows.keys, rows.offsets)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "uint64", "int32"]
    assert (rows.size, rows.num_slots) == (2, 2)


def test_columns_come_in_any_order_and_numbers_alone() -> None:
    rows = scan("2 3 4 1 0 1 0.5 1 9 1 5\n1 8 1 1 0 0 0\n", ["words", "click", "n", "user", "age"])

    assert rows.labels.tolist() == [0.0, 1.0]
    assert rows.dense.tolist() == [[2.0, 0.5], [-1.0, 0.0]]
    assert slots_of(rows) == [[9], [3, 4], [], [8]]


def test_rows_without_a_label_have_none() -> None:
    assert scan("2 1 2 1 7 0\n", ["dense_input", "user", "words"]).labels is None


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n", "\t \r\n"])
def test_blanks_between_columns_and_at_the_end_mean_nothing(end: str) -> None:
    for values in ("keys", "text"):
        assert scan(f" 2 1\t 2   1 7  0 \t1 1{end}", values=values).keys.size == 1


def test_empty_text_may_end_a_line() -> None:
    columns = ["click", "dense_input", "user", "words"]

    for end in ("\n", "\r\n"):
        assert slots_of(scan(f"1 1 2 1 2 0 1 {end}", columns, "text"))[1] == [key_of(2, "")]
        block = np.frombuffer(f"1 1 2 1 2 0 1{end}".encode(), np.uint8)
        rows, _, bad_lines = MultiSlotScanner(SCHEMA, columns, "text").scan(block)
        assert rows.size == 0
        assert "the line ends after 0 values" in bad_lines[0].fault


def test_label_may_be_written_as_a_decimal() -> None:
    assert scan("2 1 2 0 0 1 1.0\n2 1 2 0 0 1 0.0\n").labels.tolist() == [1.0, 0.0]


def test_schema_without_numbers_has_no_column_for_them() -> None:
    schema = Schema(dense=(), slots=("user",))

    rows, _, _ = MultiSlotScanner(schema).scan(np.frombuffer(b"1 7 1 1\n", np.uint8))

    assert (rows.keys.tolist(), rows.dense.shape) == ([7], (1, 0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the line ends before 'dense_input' (column 1 of 4)"),
        ("2 1 2 1 7", "the line ends before 'words' (column 3 of 4)"),
        ("x 1 2 1 7 0 1 1", "the count of 'dense_input' (column 1 of 4) is 'x', expected a whole number"),
        ("2 1 2 1.5 7 0 1 1", "the count of 'user' (column 2 of 4) is '1.5', expected a whole"),
        ("2 1 2 -1 7 0 1 1", "the count of 'user' (column 2 of 4) is '-1', expected a whole"),
        ("2 1 2 4294967296 7", "the count of 'user' (column 2 of 4) is '4294967296', expected a whole"),
        ("1 1 1 7 0 1 1", "the count of 'dense_input' (column 1 of 4) is 1, expected 2"),
        ("2 1 2 0 0 0", "the count of 'click' (column 4 of 4) is 0, expected 1"),
        ("2 1 2 0 0 2 1 1", "the count of 'click' (column 4 of 4) is 2, expected 1"),
        ("2 1 2 1 7 5 8 9", "the count of 'words' (column 3 of 4) is 5, but the line ends after 2 values"),
        ("2 1", "the count of 'dense_input' (column 1 of 4) is 2, but the line ends after 1 value"),
        ("2 1 2 0 0 1", "the count of 'click' (column 4 of 4) is 1, but the line ends after 0 values"),
        ("2 1 y 0 0 1 1", "value 2 of 2 of 'dense_input' (column 1 of 4) is 'y', expected a number"),
        ("2 1 inf 0 0 1 1", "value 2 of 2 of 'dense_input' (column 1 of 4) is 'inf', expected a"),
        ("2 1 2 2 7 8x 0 1 1", "value 2 of 2 of 'user' (column 2 of 4) is '8x', expected a whole number"),
        ("2 1 2 1 -7 0 1 1", "value 1 of 1 of 'user' (column 2 of 4) is '-7', expected a whole number"),
        ("2 1 2 1 18446744073709551616 0 1 1", "is '18446744073709551616', expected a whole"),
        ("2 1 2 0 0 1 2", "value 1 of 1 of 'click' (column 4 of 4) is '2', expected 0 or 1"),
        ("2 1 2 0 0 1 nan", "value 1 of 1 of 'click' (column 4 of 4) is 'nan', expected 0 or 1"),
        ("2 1 2 0 0 1 1 3 4", "after the last column, 'click' (column 4 of 4): '3 4'"),
        ("2 1 2 1 " + "q" * 99, "is '" + "q" * 60 + "'..., expected"),
    ],
)  # fmt: skip
def test_malformed_line_is_told_by_column_and_value(line: str, message: str) -> None:
    assert message in fault(line)


def test_malformed_single_number_is_told_by_its_name() -> None:
    columns = ["click", "age", "n", "user", "words"]
    block = np.frombuffer(b"1 1 2 3 4 1 1 0 0\n", np.uint8)

    _, _, (bad,) = MultiSlotScanner(SCHEMA, columns).scan(block)

    assert bad.fault == "the count of 'age' (column 2 of 5) is 2, expected 0 or 1"


WORDS = st.sampled_from(
    [b"0", b"1", b"2", b"3", b"7", b"x", b"-1", b"0.5", b"nan", b"99999999999999999999"]
)
LINES = st.lists(
    st.tuples(WORDS, st.sampled_from([b" ", b" ", b"  ", b"\t", b"\r"])), max_size=12
).map(lambda words: b"".join(b"".join(pair) for pair in words))
SMALL = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def likely_lines(draw: st.DrawFn) -> bytes:
    """Lines for the first of ORDERS that are right unless one of their words is exchanged."""
    cells = [
        [draw(st.integers(-2, 2)) for _ in range(2)],
        draw(SMALL),
        draw(SMALL),
        [draw(st.integers(0, 1))],
    ]
    words = [str(word).encode() for cell in cells for word in [len(cell), *cell]]
    if draw(st.booleans()):
        words[draw(st.integers(0, len(words) - 1))] = draw(WORDS)
    return b" ".join(words) + draw(st.sampled_from([b"", b"", b" ", b"\r", b" 1"]))


@given(
    lines=st.lists(LINES | likely_lines(), max_size=8),
    columns=st.sampled_from(ORDERS),
    values=st.sampled_from(["keys", "text"]),
)
def test_any_text_is_read_as_python_reads_it(
    lines: list[bytes], columns: tuple[str, ...], values: Values
) -> None:
    block = np.frombuffer(b"".join(line + b"\n" for line in lines), np.uint8)

    rows, starts, bad_lines = MultiSlotScanner(PLAIN, columns, values).scan(block)

    parsed = [reference.parse_row(line, PLAIN, columns, values) for line in lines]
    good = [row for row in parsed if row is not None]
    assert [bad.index for bad in bad_lines] == [i for i, row in enumerate(parsed) if row is None]
    all_starts = itertools.accumulate((len(line) + 1 for line in lines), initial=0)
    is_good = [row is not None for row in parsed]
    assert starts.tolist() == list(itertools.compress(all_starts, is_good))
    assert rows.labels.tolist() == [label for label, _, _ in good]
    assert slots_of(rows) == [keys for _, _, slots in good for keys in slots]
    expected = [[np.float32(-9.0 if math.isnan(x) else x) for x in dense] for _, dense, _ in good]
    assert rows.dense.tolist() == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("user", "columns is 'user', expected a list of names"),
        (
            ["dense_input", "usr", "words", "click"],
            "unknown name 'usr', did you mean 'user'",
        ),
        (["dense_input", "words", "click"], "columns has no 'user'"),
        (["age", "user", "words", "click"], "columns has no 'n'"),
        (["dense_input", "user", "words", "user"], "has 'user' twice: remove one"),
        (
            ["dense_input", "user", "words", "click", "label"],
            "has 'click' and 'label', which mean the same: remove one",
        ),
        (
            ["dense_input", "user", "words", "n"],
            "has 'n' and 'dense_input', which includes it: remove one",
        ),
    ],
)
def test_wrong_columns_are_refused(columns: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MultiSlotScanner(SCHEMA, columns)


def test_label_is_called_as_in_the_schema() -> None:
    schema = replace(SCHEMA, label="bought")
    columns = ["bought", "dense_input", "user", "words"]

    assert ColumnOrder(schema, columns).has_label
    assert ColumnOrder(schema).names == ("dense_input", "user", "words", "bought")
    with pytest.raises(UsageError, match="unknown name 'click'"):
        ColumnOrder(schema, ["click", *columns[1:]])


def test_name_that_means_two_things_is_refused() -> None:
    schema = Schema(dense=(DenseColumn(name="user"),), slots=("user",))

    with pytest.raises(
        UsageError, match="name 'user' means both a dense column and a slot: rename one"
    ):
        MultiSlotScanner(schema)


def test_unknown_kind_of_values_is_refused() -> None:
    with pytest.raises(UsageError, match="values is 'texts', expected 'keys' or 'text'"):
        MultiSlotScanner(SCHEMA, values="texts")
