"""Arrays <-> columns of bytes: little-endian, row-major, nothing between the numbers.

An encoded column is a view of its array, copied once, into the message. Decoded arrays are read-only views of
the message. A length that does not fit raises ProtocolError. Parameters may cross the wire as bfloat16, a
float32 without the lower half of its bits:

    float32    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm                     rounded to nearest, ties to even

It has the range of float32, so no gradient of any use overflows or vanishes, and 8 significant bits: rounding
changes a number by 1/256 of it at most, except below 1e-38. The largest are truncated, not rounded, so that
finite numbers stay finite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import NUM_COUNTS, Counts, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import kernel, read_only
from ctr_ps.protos.store import Numbers

_KEY, _VALUE, _NUMBER = np.dtype("<u8"), np.dtype("<f4"), np.dtype("<f8")
_COUNT, _BFLOAT16 = np.dtype("<u4"), np.dtype("<u2")

BFloat16s = NDArray[np.uint16]
"""The bits of numbers."""

_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_EXPONENT, _QUIET_NAN = np.uint32(0x7F80), np.uint32(0x0040)
_HALF, _ONE, _BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


@kernel
def _round(bits: NDArray[np.uint32], out: BFloat16s) -> None:
    # Without branches, so that the compiler takes many numbers at once.
    for i in range(bits.size):
        upper = np.uint32(bits[i] >> _BITS)
        nearest = np.uint32(bits[i] + _HALF + (upper & _ONE)) >> _BITS
        finite = upper if nearest & _EXPONENT == _EXPONENT else nearest
        # What is not a number must not become infinite, where its bits are in the lower half.
        out[i] = upper | _QUIET_NAN if bits[i] & _MAGNITUDE > _INFINITE else finite


@kernel
def _widen(halves: BFloat16s, out: NDArray[np.uint32]) -> None:
    for i in range(halves.size):
        out[i] = np.uint32(halves[i]) << _BITS


def to_bfloat16(values: Values) -> BFloat16s:
    """Returns the nearest bfloat16 of float32 of any shape, flat; finite numbers stay finite."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    out = np.empty(bits.size, np.uint16)
    _round(read_only(bits), out)
    return out


def from_bfloat16(halves: BFloat16s) -> Values:
    """Returns bfloat16[n] as the same numbers, a read-only float32[n]."""
    out = np.empty(halves.size, np.uint32)
    _widen(read_only(halves), out)
    return read_only(out.view(np.float32))


def encode_keys(keys: Keys) -> memoryview:
    """uint64[N] -> 8 * N bytes."""
    return encode_array(keys, _KEY)


def decode_keys(data: bytes) -> Keys:
    """Bytes -> uint64[N]."""
    return _decode(data, _KEY, "keys")


def encode_values(values: NDArray[np.float32]) -> memoryview:
    """float32 of any shape -> 4 bytes a number."""
    return encode_array(values, _VALUE)


def decode_values(data: bytes) -> Values:
    """Bytes -> float32[n]."""
    return _decode(data, _VALUE, "float32")


def encode_parameters(values: Values, *, bfloat16: bool) -> memoryview:
    """float32 of any shape -> 4 bytes a number, or 2 as bfloat16."""
    return encode_array(to_bfloat16(values), _BFLOAT16) if bfloat16 else encode_values(values)


def decode_parameters(data: bytes, *, bfloat16: bool) -> Values:
    """Bytes -> float32[n]."""
    if not bfloat16:
        return decode_values(data)
    return from_bfloat16(_decode(data, _BFLOAT16, "bfloat16"))


def decode_rows(data: bytes, num_rows: int, *, bfloat16: bool = False) -> Values:
    """Bytes -> float32[num_rows, D], D following from the length."""
    values = decode_parameters(data, bfloat16=bfloat16)
    if (values.size % num_rows) if num_rows else values.size:
        raise ProtocolError(
            f"a column has {values.size} numbers, expected a multiple of {num_rows}, the number of keys"
        )
    return values.reshape(num_rows, values.size // num_rows if num_rows else 0)


def encode_counts(counts: Counts | None) -> bytes | memoryview:
    """uint32[N, 2] -> 8 * N bytes; None -> no bytes."""
    return b"" if counts is None else encode_array(counts, _COUNT)


def decode_counts(data: bytes, num_rows: int) -> Counts | None:
    """Bytes -> uint32[num_rows, 2]; no bytes -> None."""
    if not data:
        return None
    if len(data) != 4 * NUM_COUNTS * num_rows:
        raise ProtocolError(
            f"a column of counts has {len(data)} bytes, expected {4 * NUM_COUNTS} for each of "
            f"{num_rows} keys"
        )
    return np.frombuffer(data, _COUNT).reshape(num_rows, NUM_COUNTS)


def encode_numbers(values: Numbers) -> memoryview:
    """float64[N] -> 8 * N bytes."""
    return encode_array(values, _NUMBER)


def decode_numbers(data: bytes) -> Numbers:
    """Bytes -> float64[N]."""
    return _decode(data, _NUMBER, "float64")


def encode_array(values: NDArray[Any], dtype: np.dtype[Any]) -> memoryview:
    """An array of any shape -> its numbers as `dtype`."""
    array = np.ascontiguousarray(values, dtype)
    return array.reshape(-1).view(np.uint8).data


def _decode(data: bytes, dtype: np.dtype[Any], what: str) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise ProtocolError(
            f"a column of {what} has {len(data)} bytes, not a multiple of {dtype.itemsize}"
        )
    return np.frombuffer(data, dtype)
