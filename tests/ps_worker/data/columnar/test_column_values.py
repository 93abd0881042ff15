"""Arrow's arrays of every type as numbers and keys: nulls, views of arrays, dictionaries, lists."""

import itertools
import math

import numpy as np
import pyarrow as pa
import pytest

from ctr_ps.ps_worker.data.columnar.column_values import (
    KeyLists,
    is_number_type,
    is_slot_type,
    numbers,
    ready_keys,
    slot_keys,
)
from tests.reference.features import key_of

SLOT = 3
VALUES = ["", "a", "12345678", "123456789", "café", None, "0" * 40, "a", "\x00"]

TEXT_TYPES = [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
    pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.uint8(), pa.large_binary()),
]  # fmt: skip


def text_array(kind: pa.DataType, values: list[str | None]) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return text_array(kind.value_type, values).dictionary_encode().cast(kind)
    return pa.array([None if v is None else v.encode() for v in values], pa.binary()).cast(kind)


def keys_of(array: pa.Array) -> list[int]:
    column = slot_keys(array, SLOT)
    assert not isinstance(column, KeyLists)
    keys = np.zeros((len(array), 2), np.uint64)
    column(0, len(array), 1, keys)
    assert not keys[:, 0].any(), "another column was written"
    return keys[:, 1].tolist()


def lists_of(column: object) -> list[list[int]]:
    assert isinstance(column, KeyLists)
    bounds = column.bounds.tolist()
    return [column.keys[start:stop].tolist() for start, stop in itertools.pairwise(bounds)]


def expected_keys(values: list[str | None]) -> list[int]:
    return [key_of(SLOT, (value or "").encode()) for value in values]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_view_of_an_array_has_the_keys_of_what_it_shows(kind: pa.DataType) -> None:
    for start in range(len(VALUES)):
        assert keys_of(text_array(kind, VALUES)[start:]) == expected_keys(VALUES[start:])


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_column_is_written_from_any_value_on(kind: pa.DataType) -> None:
    column = slot_keys(text_array(kind, ["x", None, "a", None, "b"])[1:], SLOT)
    keys = np.empty((3, 1), np.uint64)

    assert not isinstance(column, KeyLists)
    column(1, 4, 0, keys)

    assert keys[:, 0].tolist() == expected_keys(["a", None, "b"])


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_column_of_no_values_and_column_of_nulls(kind: pa.DataType) -> None:
    assert keys_of(pa.array([], kind)) == []
    assert keys_of(pa.array([None, None], kind)) == expected_keys([None, None])


def test_bytes_behind_a_null_are_not_hashed() -> None:
    bounds = pa.py_buffer(np.array([0, 3, 4], np.int32))
    array = pa.StringArray.from_buffers(2, bounds, pa.py_buffer(b"oopa"), pa.py_buffer(b"\x02"))

    assert keys_of(array) == expected_keys([None, "a"])


def test_null_in_a_dictionary_is_the_missing_value() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["a", None]))

    assert keys_of(array) == expected_keys(["a", None, None])


def test_fixed_size_text_keeps_all_its_bytes() -> None:
    array = pa.array([b"ab", None, b"c\x00"], pa.binary(2))

    assert keys_of(array) == [key_of(SLOT, value) for value in (b"ab", b"", b"c\x00")]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int8(), [-128, 0, None, 127]),
        (pa.int64(), [-(2**63), None, 2**63 - 1]),
        (pa.uint64(), [0, 2**64 - 1, None]),
        (pa.dictionary(pa.int8(), pa.int32()), [7, -7, None]),
    ],
    ids=str,
)
def test_whole_numbers_are_hashed_as_decimal_text(
    kind: pa.DataType, values: list[int | None]
) -> None:
    texts = [None if value is None else str(value) for value in values]

    if pa.types.is_dictionary(kind):
        array = pa.array(values, kind.value_type).dictionary_encode()
    else:
        array = pa.array(values, kind)

    assert keys_of(array) == expected_keys(texts)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.string()), pa.large_list(pa.binary()), pa.list_view(pa.string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ],
    ids=str,
)  # fmt: skip
def test_list_has_a_key_a_value_none_if_empty_and_the_missing_one_if_null(
    kind: pa.DataType,
) -> None:
    rows: list[list[str | None] | None] = [
        ["a", "b"],
        [],
        None,
        ["a", None, ""],
        [],
        ["longer than 8"],
    ]
    if pa.types.is_dictionary(kind.value_type):
        texts = pa.array(rows, pa.list_(pa.string()))
        values = texts.values.dictionary_encode()
        array = pa.ListArray.from_arrays(texts.offsets, values, mask=texts.is_null())
    else:
        array = pa.array(rows, kind)

    for start in range(len(rows)):
        expected = [
            [key_of(SLOT, b"")] if row is None else expected_keys(row) for row in rows[start:]
        ]
        assert lists_of(slot_keys(array[start:], SLOT)) == expected


def test_fixed_size_lists_are_lists() -> None:
    array = pa.array([["a", "b"], None, ["c", None]], pa.list_(pa.string(), 2))

    missing = key_of(SLOT, b"")
    assert lists_of(slot_keys(array, SLOT)) == [
        expected_keys(["a", "b"]), [missing], expected_keys(["c", None]),
    ]  # fmt: skip


def test_ready_keys_are_taken_as_they_are() -> None:
    missing = key_of(SLOT, b"")
    column = ready_keys(pa.array([5, None, 2**64 - 1], pa.uint64())[1:], SLOT)
    keys = np.empty((2, 1), np.uint64)
    assert not isinstance(column, KeyLists)
    column(0, 2, 0, keys)
    lists = ready_keys(pa.array([[1, 2**63], [], None, [None]], pa.list_(pa.uint64())), SLOT)

    assert keys[:, 0].tolist() == [missing, 2**64 - 1]
    assert lists_of(lists) == [[1, 2**63], [], [missing], [missing]]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None, -3], pa.int8()), [1.0, math.nan, -3.0]),
        (pa.array([2**63 - 1], pa.int64()), [2.0**63]),
        (pa.array([1.5, None, math.nan], pa.float32()), [1.5, math.nan, math.nan]),
        (pa.array([0.1], pa.float64()), [0.1]),
        (pa.array([True, False, None]), [1.0, 0.0, math.nan]),
        (pa.array([None, None]), [math.nan, math.nan]),
        (pa.array(["1.25", None]).cast(pa.decimal128(5, 2)), [1.25, math.nan]),
        (pa.array([7, 8, 7, None]).dictionary_encode(), [7.0, 8.0, 7.0, math.nan]),
        (
            pa.array([b"12", b"-0.5", None, b"+1e3", b".5", b"5."]),
            [12, -0.5, math.nan, 1000, 0.5, 5],
        ),
    ],
    ids=["int8", "int64", "float32", "float64", "bool", "null", "decimal", "dictionary", "text"],
)
def test_numbers_of_any_type(array: pa.Array, expected: list[float]) -> None:
    np.testing.assert_array_equal(numbers(array), np.array(expected))


@pytest.mark.parametrize(
    "wrong", ["x", "1,5", "0x10", " 1", "1 ", "--1", "inf", "-inf", "1e999", "."]
)
@pytest.mark.parametrize("other", ["2", "also wrong"])
def test_text_that_is_no_number_reads_inf(wrong: str, other: str) -> None:
    values = numbers(pa.array([b"1.5", wrong.encode(), None, b"nan", other.encode()]))

    assert np.isinf(values).tolist() == [False, True, False, False, other != "2"]
    assert values[0] == 1.5
    assert np.isnan(values[2:4]).all()


def test_types_that_are_neither_numbers_nor_values() -> None:
    assert not any(
        map(is_number_type, [pa.string(), pa.binary(), pa.date32(), pa.list_(pa.int8())])
    )
    assert not any(
        map(is_slot_type, [pa.float32(), pa.bool_(), pa.decimal128(5, 2), pa.list_(pa.float64())])
    )
    assert not is_slot_type(pa.dictionary(pa.int8(), pa.float64()))
    assert not is_slot_type(pa.list_(pa.list_(pa.string())))
