"""Rounding to bfloat16, beside its definition: the nearest, of two as near the even one."""

import numpy as np
import pytest

from ctr_ps.protos.wire.encoding.bfloat16 import from_bfloat16, to_bfloat16

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
