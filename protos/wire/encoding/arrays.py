"""Arrays <-> columns of bytes: little-endian, row-major, nothing between the numbers.

An encoded column is a view of its array, copied once, into the message. Decoded arrays are read-only views of
the message. A length that does not fit raises ProtocolError.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import NUM_COUNTS, Counts, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Numbers
from ctr_ps.protos.wire.encoding.bfloat16 import from_bfloat16, to_bfloat16

_KEY, _VALUE, _NUMBER = np.dtype("<u8"), np.dtype("<f4"), np.dtype("<f8")
_COUNT, _HALF = np.dtype("<u4"), np.dtype("<u2")


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
    return encode_array(to_bfloat16(values), _HALF) if bfloat16 else encode_values(values)


def decode_parameters(data: bytes, *, bfloat16: bool) -> Values:
    """Bytes -> float32[n]."""
    if not bfloat16:
        return decode_values(data)
    return from_bfloat16(_decode(data, _HALF, "bfloat16"))


def decode_rows(data: bytes, num_rows: int, *, bfloat16: bool = False) -> Values:
    """Bytes -> float32[num_rows, D], D following from the length."""
    values = decode_parameters(data, bfloat16=bfloat16)
    if (values.size % num_rows) if num_rows else values.size:
        raise ProtocolError(
            f"a column has {values.size} numbers, which {num_rows} keys cannot share equally"
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
