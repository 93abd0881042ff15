"""Checks of Arrow's indices and bounds: each against a loop over the values."""

import numpy as np
import pyarrow as pa
import pytest

from ctr_ps.ps_worker.data.columnar.parquet_orc import require_valid


def batch(array: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], names=["x"])


STRING = pa.string()


def text(bounds: list[int], kind: pa.DataType = STRING) -> pa.Array:
    dtype = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
    buffers = [None, pa.py_buffer(np.array(bounds, dtype)), pa.py_buffer(b"abcdef")]
    return pa.Array.from_buffers(kind, len(bounds) - 1, buffers)


def lists(bounds: list[int], values: pa.Array, kind: type[pa.Array] = pa.ListArray) -> pa.Array:
    large = kind is pa.LargeListArray
    own = pa.large_list(values.type) if large else pa.list_(values.type)
    offsets = np.array(bounds, np.int64 if large else np.int32)
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(own, len(bounds) - 1, buffers, children=[values])


def choices(indices: list[int | None], values: pa.Array, kind: pa.DataType) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, kind), values, safe=False)


NUMBERS = pa.array(range(6))
TEXT = pa.array(["a", "b"])


@pytest.mark.parametrize(
    "array",
    [
        text([0, 2, 2, 6]),
        text([0, 2, 2, 6])[1:],
        text([1, 6], pa.large_string()),
        text([0, 6], pa.large_binary()),
        pa.array([b"\xff\xfe", None], pa.binary()).view(pa.string()),
        lists([0, 0, 6], NUMBERS),
        lists([2, 4], NUMBERS, pa.LargeListArray),
        pa.ListViewArray.from_arrays([3, 0], [3, 6], NUMBERS),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        choices([0, 1, None], TEXT, pa.int8()),
        choices([0, 9], TEXT, pa.int8())[:1],
        choices([None], pa.array([], pa.string()), pa.int32()),
        pa.array([], pa.list_(pa.string())),
        pa.array([], pa.dictionary(pa.int32(), pa.string())),
        pa.array([{"a": "x"}, None]),
        pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        pa.array(["a", None], pa.string_view()),
        pa.array([None, None]),
    ],
    ids=lambda array: str(array.type),
)
def test_what_lies_within_its_values_is_valid(array: pa.Array) -> None:
    require_valid(batch(array))


@pytest.mark.parametrize(
    "array",
    [
        text([0, 4, 2, 6]),
        text([0, 9, 6], pa.large_binary()),
        lists([0, 8, 6], NUMBERS),
        lists([0, 4, 2, 6], NUMBERS, pa.LargeListArray),
        lists([0, 2], text([0, 9, 6])),
        pa.Array.from_buffers(
            pa.struct([("a", pa.string())]), 2, [None], children=[text([0, 9, 6])]
        ),
        choices([0, 2], TEXT, pa.int8()),
        choices([-1, 0], TEXT, pa.int64()),
        choices([2**32 - 1], TEXT, pa.uint32()),
        choices([0], text([0, 9, 6]), pa.int8()),
        lists([0, 2], choices([0, 7], TEXT, pa.int32())),
        pa.ListViewArray.from_arrays([3, 0], [4, 6], NUMBERS),
        pa.LargeListViewArray.from_arrays([0, -1], [6, 2], NUMBERS),
        pa.MapArray.from_arrays([0, 2], text([0, 9, 6]), NUMBERS[:2]),
    ],
    ids=lambda array: str(array.type),
)
def test_what_does_not_is_refused_with_its_column(array: pa.Array) -> None:
    with pytest.raises(pa.ArrowInvalid, match="column 'x': "):
        require_valid(batch(array))


def test_slice_is_judged_by_its_own_rows() -> None:
    """Bounds and indices of a slice begin behind those of the rows before it."""
    require_valid(batch(text([0, 4, 2, 3, 6])[2:]))
    require_valid(batch(choices([9, 0, 1], TEXT, pa.int8())[1:]))

    for array in (text([0, 1, 2, 4, 3, 6])[2:], choices([0, 1, 9], TEXT, pa.int8())[2:]):
        with pytest.raises(pa.ArrowInvalid, match="column 'x': "):
            require_valid(batch(array))
