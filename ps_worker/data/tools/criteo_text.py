"""Writing of rows as text in Criteo's layout, the inverse of `criteo_scanner`."""

import numpy as np
from numpy.typing import NDArray

from ctr_model.jit import kernel

_TAB, _NEWLINE, _ZERO, _LETTERS = (np.uint8(ord(character)) for character in "\t\n0W")

_MAX_DIGITS = 19
_HEX_DIGITS = 8


@kernel
def write_decimal(number: int, position: int, text: NDArray[np.uint8]) -> int:
    """Writes the digits of a non-negative number; returns the position after them."""
    num_digits = 1
    rest = number // 10
    while rest > 0:
        num_digits += 1
        rest //= 10
    for offset in range(num_digits - 1, -1, -1):
        text[position + offset] = _ZERO + np.uint8(number % 10)
        number //= 10
    return position + num_digits


@kernel
def write_hex(number: int, position: int, text: NDArray[np.uint8]) -> int:
    """Writes 8 lower-case hex digits; returns the position after them."""
    for offset in range(_HEX_DIGITS - 1, -1, -1):
        digit = np.uint8(number & 15)
        # "W" + 10 is "a".
        text[position + offset] = digit + (_ZERO if digit < 10 else _LETTERS)
        number >>= 4
    return position + _HEX_DIGITS


@kernel
def write_rows(
    clicks: NDArray[np.bool_],
    numbers: NDArray[np.float64],
    values: NDArray[np.int64],
    text: NDArray[np.uint8],
) -> int:
    """Writes rows, see `criteo_text`; returns the number of bytes."""
    position = 0
    for row in range(len(clicks)):
        text[position] = _ZERO + np.uint8(clicks[row])
        position += 1
        for number in numbers[row]:
            text[position] = _TAB
            position += 1
            if not np.isnan(number):
                position = write_decimal(int(number), position, text)
        for value in values[row]:
            text[position] = _TAB
            position += 1
            if value >= 0:
                position = write_hex(value, position, text)
        text[position] = _NEWLINE
        position += 1
    return position


def criteo_text(
    clicks: NDArray[np.bool_], numbers: NDArray[np.float64], values: NDArray[np.int64]
) -> bytes:
    r"""Returns R rows as text: label, numbers, values, separated by "\t" and terminated by "\n".

    Args:
        clicks: bool[R], the labels.
        numbers: float64[R, num_dense], whole numbers in [0, 2^63); nan is missing, an empty field.
        values: int64[R, S], below 2^32, written as 8 hex digits; -1 is missing.
    """
    row_bytes = 2 + numbers.shape[1] * (1 + _MAX_DIGITS) + values.shape[1] * (1 + _HEX_DIGITS)
    text = np.empty(len(clicks) * row_bytes, np.uint8)
    return text[: write_rows(clicks, numbers, values, text)].tobytes()
