"""Arrays to bytes and back; bfloat16 beside its definition: the nearest, of two as near the even one."""

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
    from_bfloat16,
    to_bfloat16,
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
    with pytest.raises(
        ProtocolError,
        match=f"{num_bytes // 4} numbers, expected a multiple of {num_rows}, the number of",
    ):
        decode_rows(bytes(num_bytes), num_rows)


LARGEST = np.float32(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])


def test_each_bfloat16_is_itself_again() -> None:
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    is_nan = ((halves & 0x7F80) == 0x7F80) & ((halves & 0x7F) != 0)

    again = to_bfloat16(from_bfloat16(halves))

    np.testing.assert_array_equal(again[~is_nan], halves[~is_nan])
    assert np.isnan(from_bfloat16(again[is_nan])).all()


def test_each_number_becomes_the_nearest() -> None:
    """Numbers between two bfloat16s, the middle and its neighbours among them, of all exponents."""
    rng = np.random.default_rng(0)
    upper = rng.integers(0, 0x7F7F, 20_000).astype(np.uint32) | (
        rng.integers(0, 2, 20_000) << 15
    ).astype(np.uint32)
    lower = rng.integers(0, 2**16, (50, upper.size)).astype(np.uint32)
    lower[:5] = np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)[:, None]
    values = ((upper << 16) + lower).view(np.float32)
    below = np.broadcast_to(upper << 16, values.shape).view(np.float32).astype(np.float64)
    above = np.broadcast_to((upper + 1) << 16, values.shape).view(np.float32).astype(np.float64)
    to_below, to_above = np.abs(values - below), np.abs(above - values)
    is_even = np.broadcast_to(upper % 2 == 0, values.shape)
    nearest = np.where((to_below < to_above) | ((to_below == to_above) & is_even), below, above)

    found = from_bfloat16(to_bfloat16(values))

    np.testing.assert_array_equal(found.reshape(values.shape), nearest)
    assert not found.flags.writeable  # as all that comes off the wire


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.inf, np.inf),
        (-np.inf, -np.inf),
        (np.finfo(np.float32).max, LARGEST),
        (-np.finfo(np.float32).max, -LARGEST),
        (-0.0, -0.0),
    ],
)
def test_finite_numbers_stay_finite(value: float, expected: float) -> None:
    (found,) = from_bfloat16(to_bfloat16(np.array([value], np.float32)))

    assert found == expected
    assert np.signbit(found) == np.signbit(expected)


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF])
def test_what_is_no_number_stays_none(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)

    assert np.isnan(from_bfloat16(to_bfloat16(value))).all()
