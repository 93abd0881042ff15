"""Arrays to bytes and back."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.wire.encoding.arrays import (
    decode_keys,
    decode_numbers,
    decode_rows,
    decode_values,
    encode_keys,
    encode_numbers,
    encode_values,
)

FLOATS = st.floats(width=32, allow_nan=False)


@given(keys=st.lists(st.integers(0, 2**64 - 1)))
def test_keys_are_little_endian_words(keys: list[int]) -> None:
    data = encode_keys(np.array(keys, np.uint64))

    assert data == struct.pack(f"<{len(keys)}Q", *keys)
    assert decode_keys(data).tolist() == keys


@given(values=st.lists(FLOATS))
def test_values_are_little_endian_floats(values: list[float]) -> None:
    data = encode_values(np.array(values, np.float32))

    assert data == struct.pack(f"<{len(values)}f", *values)
    assert decode_values(data).tolist() == values


@given(numbers=st.lists(st.floats(allow_nan=False)))
def test_numbers_are_little_endian_doubles(numbers: list[float]) -> None:
    data = encode_numbers(np.array(numbers, np.float64))

    assert data == struct.pack(f"<{len(numbers)}d", *numbers)
    assert decode_numbers(data).tolist() == numbers


def test_not_a_number_keeps_its_bits() -> None:
    bits = np.array([0x7FC00001, 0xFF800001], np.uint32)

    data = encode_values(bits.view(np.float32))

    assert np.frombuffer(data, np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param(np.arange(6, dtype=np.float32).reshape(2, 3), id="row-major"),
        pytest.param(np.arange(6, dtype=np.float32).reshape(3, 2).T, id="column-major"),
        pytest.param(np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2], id="strided"),
        pytest.param(np.arange(6, dtype=">f4").reshape(2, 3), id="big-endian"),
        pytest.param(np.zeros((3, 0), np.float32), id="no-columns"),
        pytest.param(np.zeros((0, 0), np.float32), id="no-rows"),
    ],
)
def test_rows_come_back_whatever_their_memory_layout(matrix: np.ndarray) -> None:
    rows = decode_rows(encode_values(matrix), matrix.shape[0])

    assert rows.shape == matrix.shape
    assert rows.tolist() == matrix.tolist()


def test_decoded_arrays_are_read_only_views() -> None:
    assert not decode_keys(bytes(8)).flags.writeable
    assert not decode_numbers(bytes(8)).flags.writeable
    assert not decode_rows(bytes(8), 1).flags.writeable


def test_columns_of_broken_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="9 bytes"):
        decode_keys(bytes(9))
    with pytest.raises(ProtocolError, match="12 bytes"):
        decode_numbers(bytes(12))
    with pytest.raises(ProtocolError, match="6 bytes"):
        decode_values(bytes(6))


@pytest.mark.parametrize(("num_bytes", "num_rows"), [(12, 2), (4, 0)])
def test_rows_of_unequal_width_are_refused(num_bytes: int, num_rows: int) -> None:
    with pytest.raises(ProtocolError, match=f"{num_bytes // 4} numbers, which {num_rows} keys"):
        decode_rows(bytes(num_bytes), num_rows)
