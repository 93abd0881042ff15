"""Tensors as samples: whatever way their values come, and what is refused."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.data.user_code.samples import Sample, batches_of_samples
from ctr_ps.ps_worker.extras.inference_server.tensors import (
    DTYPES,
    Tensor,
    inputs_of,
    raw_of,
    samples_of,
    tensor_of_raw,
    tensor_of_values,
)

SCHEMA = Schema(dense=(DenseColumn(name="price"),), slots=("user", "tags"))


def samples(tensors: Sequence[Tensor], *, max_rows: int) -> list[Sample]:
    """Returns the samples of a model whose tags were lists of text."""
    values = SlotValues({"user": ["keys"], "tags": ["text", "lists"]})
    return samples_of(tensors, SCHEMA, max_rows=max_rows, values=values)


def raw_texts(texts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def texts(name: str, *values: bytes, shape: Sequence[int] = ()) -> Tensor:
    return tensor_of_values(name, "BYTES", shape or [len(values)], values)


def prices(*values: float, shape: Sequence[int] = ()) -> Tensor:
    return tensor_of_values("price", "FP32", shape or [len(values)], values)


@given(values=st.lists(st.binary(max_size=20), max_size=8))
def test_texts_are_the_same_as_values_and_as_bytes(values: list[bytes]) -> None:
    shape = [len(values)]

    as_bytes = tensor_of_raw("t", "BYTES", shape, raw_texts(values))

    assert as_bytes == tensor_of_values("t", "BYTES", shape, values)


@pytest.mark.parametrize("datatype", DTYPES)
def test_numbers_are_the_same_as_values_and_as_bytes(datatype: str) -> None:
    values = np.array([0, 1, 100], DTYPES[datatype])  # of BOOL: False, True, True

    as_bytes = tensor_of_raw("t", datatype, [3], values.tobytes())
    as_values = tensor_of_values("t", datatype, [3], values.tolist())

    assert np.array_equal(as_bytes.values, as_values.values)
    assert as_bytes.values.dtype == as_values.values.dtype


def test_rows_of_a_request_are_samples() -> None:
    tensors = [
        texts("tags", b"a", b"", b"", b"b", b"", b"", shape=[3, 2]),
        prices(1.5, math.nan, 2.0, shape=[3, 1]),
        texts("user", b"u", b"", b"w"),
    ]

    first, second, third = samples(tensors, max_rows=3)

    assert first == (None, [1.5], [b"u", [b"a"]])
    assert second[2] == [b"", [b"", b"b"]]
    assert math.isnan(second[1][0])
    assert third == (None, [2.0], [b"w", []])


def test_number_of_float64_that_a_model_does_not_hold_is_refused_with_its_row() -> None:
    price = tensor_of_values("price", "FP64", [2], [1.5, 1e39])
    tensors = [price, texts("user", b"u", b"v"), texts("tags", b"a", b"b")]
    rows = samples_of(tensors, SCHEMA, max_rows=2, values=SlotValues())

    with pytest.raises(
        DataError, match=r"^sample 2: column 'price' is 1e\+39, beyond the range of"
    ):
        list(batches_of_samples(rows, SCHEMA, batch_size=2))


def test_a_missing_number_of_json_is_nan() -> None:
    tensor = tensor_of_values("price", "FP32", [2], [None, 1])

    assert np.isnan(tensor.values[0])


def test_whole_numbers_of_a_slot_are_keys() -> None:
    keys = tensor_of_values("user", "UINT64", [1], [2**64 - 1])

    ((_, _, slots),) = samples([keys, texts("tags", b"a"), prices(1)], max_rows=1)

    assert slots == [2**64 - 1, b"a"]


# A list of a request and what it is in the data, there as the user, whose slot has no lists, and as tags.
LISTS = st.lists(st.binary(min_size=1, max_size=2), max_size=4)


@given(rows=st.lists(LISTS, min_size=1, max_size=5), more=st.integers(0, 2), data=st.data())
def test_row_is_the_same_whatever_stands_beside_it(
    rows: list[list[bytes]], more: int, data: st.DataObject
) -> None:
    def tensors(some: list[list[bytes]], width: int) -> list[Tensor]:
        flat = [value for row in some for value in [*row, *[b""] * (width - len(row))]]
        shape = [len(some), width]
        return [
            texts("user", *flat, shape=shape),
            texts("tags", *flat, shape=shape),
            prices(*[1] * len(some)),
        ]

    width = max(1, *map(len, rows)) + more
    together = samples(tensors(rows, width), max_rows=5)

    for row, found in zip(rows, together, strict=True):
        own = max(1, len(row))
        assert samples(tensors([row], data.draw(st.integers(own, own + 2))), max_rows=1) == [found]
        assert found[2] == [row or b"", row]


def test_lengths_say_how_many_values_a_row_has() -> None:
    """So also what padding cannot: a missing list, empty texts at the end, and lists of whole numbers."""
    tensors = [
        tensor_of_values("user", "INT64", [4, 2], [0, 0, 7, 0, 7, 8, 5, 5]),
        tensor_of_values("user.lengths", "INT32", [4], [0, 1, 2, -1]),
        texts("tags", b"", b"", b"a", b"", b"b", b"x", b"", b"c", shape=[4, 2]),
        tensor_of_values("tags.lengths", "INT64", [4, 1], [-1, 2, 1, 0]),
        prices(1, 1, 1, 1),
    ]

    found = [slots for _, _, slots in samples(tensors, max_rows=4)]

    assert found == [[[], b""], [[7], [b"a", b""]], [[7, 8], [b"b"]], [b"", []]]


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        (
            tensor_of_values("tags.lengths", "INT32", [1], [3]),
            "has length 3, expected .* from 0 to 2",
        ),
        (tensor_of_values("tags.lengths", "INT32", [1], [-2]), "has length -2, expected"),
        (tensor_of_values("tags.lengths", "FP32", [1], [1]), "is FP32 .* expected whole numbers"),
        (tensor_of_values("tags.lengths", "INT32", [2], [1, 1]), "different numbers of rows"),
        (tensor_of_values("price.lengths", "INT32", [1], [1]), "unknown: price.lengths"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Tensor, why: str) -> None:
    tensors = [texts("user", b"u"), texts("tags", b"a", b"b", shape=[1, 2]), prices(1), lengths]

    with pytest.raises(DataError, match=why):
        samples(tensors, max_rows=1)


def test_a_slot_may_have_the_name_of_lengths() -> None:
    schema = Schema(dense=(), slots=("user", "user.lengths"))
    tensors = [texts("user", b"a"), texts("user.lengths", b"b")]

    found = samples_of(tensors, schema, max_rows=1, values=SlotValues())

    assert found == [(None, [], [b"a", b"b"])]


@pytest.mark.parametrize("datatype", ["BOOL", "FP32"])
def test_a_boolean_is_0_or_1(datatype: str) -> None:
    found = tensor_of_values("price", datatype, [3], [True, False, True])

    assert [row[1] for row in samples([*TEXTS, found], max_rows=3)] == [[1.0], [0.0], [1.0]]
    if datatype == "BOOL":
        assert tensor_of_raw("price", "BOOL", [3], b"\1\0\1").values.tolist() == [True, False, True]


TEXTS = [texts(name, b"a", b"b", b"c") for name in ("user", "tags")]
GOOD = {"user": texts("user", b"a", b"b"), "tags": texts("tags", b"a", b"b"), "price": prices(1, 2)}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"user": None}, "missing: user: send one tensor for each column"),
        ({"other": texts("other", b"a", b"b")}, "unknown: other"),
        ({"again": texts("user", b"a", b"b")}, "there twice: user"),
        ({"user": texts("user", b"a")}, "different numbers of rows"),
        ({"price": texts("price", b"1", b"2")}, "dense column 'price' is BYTES"),
        ({"price": prices(1, 2, 3, 4, shape=[2, 2])}, r"'price' is FP32 of shape \[2, 2\]"),
        ({"user": tensor_of_values("user", "FP32", [2], [1, 2])}, "slot 'user' is FP32"),
        ({"user": tensor_of_values("user", "BOOL", [2], [True] * 2)}, "slot 'user' is BOOL"),
        (
            {"user": texts("user", b"a", b"b", shape=[2, 1, 1])},
            r"shape \[2, 1, 1\], expected BYTES",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], why: str) -> None:
    tensors = [each for each in {**GOOD, **changes}.values() if each is not None]

    with pytest.raises(DataError, match=why):
        samples(tensors, max_rows=10)


def test_tensors_whose_rows_differ_from_most_others_are_named() -> None:
    slots = tuple(f"C{i}" for i in range(1, 21))
    tensors = [texts(slot, *([b"a"] * (1 if slot in ("C9", "C20") else 2))) for slot in slots]

    with pytest.raises(DataError, match=r"numbers of rows: C1 2, but C9 1, C20 1$"):
        samples_of(tensors, Schema(dense=(), slots=slots), max_rows=10, values=SlotValues())


def test_few_of_many_tensors_with_other_rows_are_shown() -> None:
    slots = tuple(f"C{i}" for i in range(1, 21))
    tensors = [texts(slot, *([b"a"] * (i + 1 if i < 8 else 10))) for i, slot in enumerate(slots)]

    with pytest.raises(DataError, match=r"C9 10, but C1 1, C2 2, C3 3, C4 4, C5 5 and 3 more$"):
        samples_of(tensors, Schema(dense=(), slots=slots), max_rows=10, values=SlotValues())


@pytest.mark.parametrize("num_rows", [0, 11])
def test_request_without_rows_or_with_too_many_is_refused(num_rows: int) -> None:
    names = [b"a"] * num_rows
    tensors = [
        tensor_of_values("user", "BYTES", [num_rows], names),
        tensor_of_values("tags", "BYTES", [num_rows], names),
        tensor_of_values("price", "FP32", [num_rows], [1] * num_rows),
    ]

    with pytest.raises(DataError, match=f"has {num_rows} rows, expected 1 to 10"):
        samples(tensors, max_rows=10)


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "why"),
    [
        ("FP32", [2], b"1234", "has 4 bytes, expected 8"),
        ("FP16", [2], b"1234", "datatype 'FP16', expected one of BYTES, INT8"),
        ("BYTES", [2], raw_texts([b"a"]), "expected the lengths and bytes of 2 texts"),
        ("BYTES", [1], raw_texts([b"a", b"b"]), "expected the lengths and bytes of 1 texts"),
        (
            "BYTES",
            [1],
            struct.pack("<I", 2**31) + b"a",
            "expected the lengths and bytes of 1 texts",
        ),
        ("BYTES", [10**7], b"", "expected the lengths and bytes of"),
        ("BOOL", [2], b"\1\2", "is BOOL, but has a byte that is neither 0 nor 1"),
        ("FP32", [-1], b"", "expected up to 3 dimensions, each 0 to"),
        ("FP32", ["2"], b"", "expected up to 3 dimensions, each 0 to"),
        ("FP32", [True], b"", "expected up to 3 dimensions, each 0 to"),
        ("FP32", [1, 1, 1, 1], b"", "expected up to 3 dimensions, each 0 to"),
        ("FP32", [10**4000] * 1000, b"", "expected up to 3 dimensions, each 0 to"),
    ],
)
def test_bytes_that_are_not_those_of_the_shape_are_refused(
    datatype: str, shape: list[Any], raw: bytes, why: str
) -> None:
    with pytest.raises(DataError, match=why):
        tensor_of_raw("t", datatype, shape, raw)


@pytest.mark.parametrize(
    ("datatype", "values", "why"),
    [
        ("FP32", [1], "has 1 values, expected 2"),
        ("FP32", ["3e2", 1], "has the value '3e2', expected FP32"),
        ("INT64", [1, True], "has the value 'True', expected INT64"),
        ("BOOL", [1, True], "has the value '1', expected BOOL"),
        ("INT64", [1, 1.7], "has the value '1.7', expected INT64"),
        ("INT64", [None, 1], "has the value 'None', expected INT64"),
        ("INT32", [1, 2**40], "values that are not INT32"),
        ("UINT64", [1, -1], "values that are not UINT64"),
        ("FP32", [1, 10**400], "values that are not FP32"),
        ("FP32", [[1], [2, 3]], r"has the value '\[1\]', expected FP32"),
        ("BYTES", ["a", 1], "has the value '1', expected text"),
        ("BYTES", ["a", "\ud800"], "expected text"),
    ],
)
def test_values_of_another_type_are_refused(datatype: str, values: list[Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        tensor_of_values("t", datatype, [2], values)


def test_output_is_little_endian_float32() -> None:
    assert raw_of(np.array([0.5, 1.0], ">f4")) == struct.pack("<2f", 0.5, 1.0)


VECTORS = Schema.from_dict(
    {"hash_version": 1, "dense": [{"name": "v", "width": 3}, {"name": "price"}], "slots": ["user"]}
)


def test_vector_is_one_tensor_or_one_for_each_of_its_numbers() -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    others = [prices(7.0, 8.0), texts("user", b"a", b"b")]
    whole = tensor_of_raw("v", "FP32", [2, 3], numbers.tobytes())
    parts = [tensor_of_values(f"v[{i}]", "FP32", [2], numbers[:, i].tolist()) for i in range(3)]

    found = samples_of([whole, *others], VECTORS, max_rows=2, values=SlotValues())

    assert found == samples_of([*parts, *others], VECTORS, max_rows=2, values=SlotValues())
    assert [dense for _, dense, _ in found] == [[0, 1, 2, 7], [3, 4, 5, 8]]
    assert [(each.name, each.shape) for each in inputs_of(VECTORS)] == [
        ("price", (-1,)),
        ("v", (-1, 3)),
        ("user", (-1, -1)),
    ]


@pytest.mark.parametrize("shape", [[2], [2, 2], [3, 2]])
def test_vector_of_another_width_is_refused(shape: list[int]) -> None:
    vector = tensor_of_values("v", "FP32", shape, [0.5] * math.prod(shape))

    with pytest.raises(DataError, match=r"vector 'v' is FP32 of shape .*numbers of shape \[N, 3\]"):
        samples_of([vector, prices(7.0)], VECTORS, max_rows=9, values=SlotValues())
