"""libsvm and libffm: entries in any order, omitted entries, errors that name the entry."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.text.svm import LibsvmReader, SvmScanner
from tests.reference import svm as reference

SVM = Schema(
    dense=(DenseColumn(name="30", shift=1.0, scale=2.0), DenseColumn(name="4", missing=-9.0)),
    slots=("features",),
)
FFM = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0), DenseColumn(name="n", missing=-9.0)),
    slots=("user", "words"),
)


def scan(text: str, schema: Schema) -> Batch:
    scanner = SvmScanner(schema, has_fields=schema is FFM)
    rows, _, bad_lines = scanner.scan(np.frombuffer(text.encode(), np.uint8))
    assert bad_lines == []
    return rows


def slots_of(rows: Batch) -> list[list[int]]:
    return [rows.keys[a:b].tolist() for a, b in itertools.pairwise(rows.offsets.tolist())]


def test_libsvm_has_numbers_by_index_and_all_else_in_its_slot() -> None:
    rows = scan("+1 4:0.5 7:1 30:5 204:1\n-1\n0 7:1.0\n1 4:-2e1 30:1\n", SVM)

    assert rows.labels.tolist() == [1, 0, 0, 1]
    assert rows.dense.tolist() == [[2.0, 0.5], [-0.5, 0.0], [-0.5, 0.0], [0.0, -20.0]]
    assert slots_of(rows) == [[key_of(1, "7"), key_of(1, "204")], [], [key_of(1, "7")], []]


def test_schema_without_numbers_makes_every_index_a_value() -> None:
    schema = Schema(dense=(), slots=("features",))

    assert scan("1 0:1 18446744073709551615:1\n", schema).keys.tolist() == [
        key_of(1, "0"),
        key_of(1, "18446744073709551615"),
    ]


@pytest.mark.parametrize(
    ("schema", "line", "message"),
    [
        (SVM, "", "the label is '', expected 0, 1 or -1"),
        (SVM, "2 7:1", "the label is '2', expected 0, 1 or -1"),
        (SVM, "7:1 8:1", "the label is '7:1', expected 0, 1 or -1"),
        (SVM, "1 7", "'7' does not have the form index:number"),
        (
            SVM,
            "1 7:1 7:",
            "'7:' is a value of slot 'features', which have no weights, so its number must be 1",
        ),
        (SVM, "1 qid:1 7:1", "'qid:1' does not have the form index:number"),
        (SVM, "1 1:2:1", "'1:2:1' does not have the form index:number"),
        (
            SVM,
            "1 7:1#note",
            "'7:1#note' is a value of slot 'features', which have no weights, so its number must be 1",
        ),
        (SVM, "1 7 # note", "'7' does not have the form index:number"),
        (SVM, "# 1 7:1", "the label is '#', expected 0, 1 or -1"),
        (SVM, "1.5 7:1", "the label is '1.5', expected 0, 1 or -1"),
        (SVM, "nan 7:1", "the label is 'nan', expected 0, 1 or -1"),
        (SVM, "1 4:1e39", "column '4' is 1e+39, beyond the range of float32"),
        (FFM, "1 0:1:7e38", "column 'age' is 7e+38, beyond"),
        (
            SVM,
            "1 7:0.5",
            "'7:0.5' is a value of slot 'features', which have no weights, so its number must be 1",
        ),
        (SVM, "1 4:x", "the number of '4' is 'x', expected a number"),
        (SVM, "1 30:1 4:1 30:2", "'30:2' gives '30' a second number"),
        (FFM, "1 2:1", "'2:1' does not have the form field:index:number"),
        (FFM, "1 2::1", "'2::1' does not have the form field:index:number"),
        (FFM, "1 2:u:1:1", "'2:u:1:1' does not have the form field:index:number"),
        (FFM, "1 4:u:1", "the field of '4:u:1' is not in the schema, expected 0 to 3"),
        (FFM, "1 18446744073709551615:u:1", "is not in the schema, expected 0 to 3"),
        (
            FFM,
            "1 3:u:0.2",
            "'3:u:0.2' is a value of slot 'words', which have no weights, so its number must be 1",
        ),
        (FFM, "1 1:u:nan", "the number of 'n' is 'nan', expected a number"),
        (FFM, "1 0:1:2 0:1:2", "'0:1:2' gives 'age' a second number"),
        (FFM, f"1 {'0' * 21}:u:1", "the first number of '000000000000000000000:u:1' is above"),
        (SVM, "1 18446744073709551616:1", "the first number of '18446744073709551616:1' is above"),
        (SVM, f"1 {'7' * 5000}:1", f"the first number of '{'7' * 60}'... is above 2**64 - 1"),
        (SVM, "\x01 2 7:1", "the label is '2', expected 0, 1 or -1"),
        (SVM, "1 7:1\x017", "'7' does not have the form index:number"),
    ],
)
def test_malformed_line_is_told_by_its_word(schema: Schema, line: str, message: str) -> None:
    block = np.frombuffer(f"1\n{line}\n0\n".encode(), np.uint8)

    rows, _, (bad,) = SvmScanner(schema, has_fields=schema is FFM).scan(block)

    assert message in bad.fault
    assert (bad.index, bad.start) == (1, 2)
    assert rows.labels.tolist() == [1, 0]


LABELS = st.sampled_from(
    [b"0", b"1", b"+1", b"-1", b"1.0", b"0.0", b"-1.0", b"1e0", b"-0", b"0.5", b"nan", b"2", b""]
)
WORDS = st.one_of(
    st.from_regex(rb"[0-4]:[ab4]{1,9}:1", fullmatch=True),
    st.from_regex(rb"[0-4]:1", fullmatch=True),
    st.sampled_from([b"30:2", b"4:-0.5", b"1:1:2", b"0:x:7", b"0:2:", b":1", b"1:", b"5", b"2:a:1.0"]),
    st.sampled_from([b"2:#a:1", b"#", b"# 7:1", b"#:1:2"]),
)  # fmt: skip
LINES = st.tuples(LABELS, st.lists(WORDS, max_size=4), st.sampled_from([b" ", b"  ", b"\t"]))


@given(
    lines=st.lists(LINES, max_size=6),
    has_fields=st.booleans(),
    end=st.sampled_from([b"\n", b" \r\n"]),
)
def test_any_text_is_read_as_python_reads_it(
    lines: list[tuple[bytes, list[bytes], bytes]], has_fields: bool, end: bytes
) -> None:
    schema = Schema(
        dense=(DenseColumn(name="30", missing=-9.0), DenseColumn(name="4", missing=-9.0)),
        slots=("user", "words") if has_fields else ("features",),
    )
    texts = [blank.join([label, *words]) for label, words, blank in lines]
    block = np.frombuffer(b"".join(text + end for text in texts), np.uint8)

    rows, starts, bad_lines = SvmScanner(schema, has_fields=has_fields).scan(block)

    parsed = [reference.parse_row(text, schema, has_fields) for text in texts]
    good = [row for row in parsed if row is not None]
    assert [bad.index for bad in bad_lines] == [i for i, row in enumerate(parsed) if row is None]
    all_starts = itertools.accumulate((len(text + end) for text in texts), initial=0)
    is_good = [row is not None for row in parsed]
    assert starts.tolist() == list(itertools.compress(all_starts, is_good))
    assert rows.labels.tolist() == [label for label, _, _ in good]
    assert rows.dense.tolist() == [
        [-9.0 if math.isnan(x) else x for x in row] for _, row, _ in good
    ]
    assert slots_of(rows) == [keys for _, _, slots in good for keys in slots]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (FFM, "its schema has one slot, not 2"),
        (Schema(dense=(DenseColumn(name="age"),), slots=("a",)), "dense column 'age': with libsvm"),
        (Schema(dense=(DenseColumn(name="07"),), slots=("a",)), "dense column '07': with libsvm"),
        (Schema(dense=(DenseColumn(name=f"{2**64}"),), slots=("a",)), "an index is at most"),
    ],
)
def test_schema_that_libsvm_cannot_have_is_refused(schema: Schema, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LibsvmReader(schema, BadRows(0))
