r"""Kernels that parse numbers in text: uint64 exactly, decimals to the nearest float64.

A decimal s * 10^e, with s of up to 19 digits, is the product of s and a power of ten in double-double
arithmetic, so that only the last step rounds: T. J. Dekker, "A floating-point technique for extending the
available precision", Numerische Mathematik 18, 1971. Digits after the 19th are ignored.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel

_ZERO, _ONE, _MINUS, _PLUS, _POINT = (np.uint8(ord(character)) for character in "01-+.")
_LOWER_CASE = np.uint8(0x20)  # set in a lower-case letter, clear in its capital
_E, _N, _A = (np.uint8(ord(character)) for character in "ena")

MAX_KEY_DIGITS = 20
_ROOM = np.uint64(10**18)  # a significand below this has room for one more digit
_EXACT = np.uint64(2**53)  # whole numbers up to this are float64 numbers, as are powers up to 10^22
_EXACT_EXPONENT = 22
# Within these exponents no step of the product underflows or overflows.
_MAX_EXPONENT = 270
_LEAST_EXPONENT, _GREATEST_EXPONENT = -400, 400  # beyond, s * 10^e is 0 or infinite for every s
_SPLITTER = 2.0**27 + 1

_POWERS = [Fraction(10) ** exponent for exponent in range(-_MAX_EXPONENT, _MAX_EXPONENT + 1)]
_HIGH = np.array([float(power) for power in _POWERS])
_LOW = np.array([float(power - Fraction(float(power))) for power in _POWERS])


@kernel
def parse_key(block: NDArray[np.uint8], start: int) -> tuple[np.uint64, int]:
    """Returns the digits at `start` as a uint64, and their end, or `start` if there is no such number."""
    key = np.uint64(0)
    position = start
    digit = block[position] - _ZERO  # unsigned: bytes below "0" wrap to far above 9
    while digit <= 9:
        key = key * np.uint64(10) + np.uint64(digit)
        position += 1
        digit = block[position] - _ZERO
    num_digits = position - start
    # A uint64 of 20 digits begins with 1; larger numbers that do wrap around to fewer than 20 digits.
    is_long = (num_digits == MAX_KEY_DIGITS) & (block[start] == _ONE) & (key >= np.uint64(10**19))
    fits = (num_digits < MAX_KEY_DIGITS) | is_long
    return key, position if fits else start


@kernel
def is_nan(block: NDArray[np.uint8], start: int, stop: int) -> bool:
    """Returns whether `block[start:stop]` is "nan", ignoring case."""
    if stop - start != 3:
        return False
    matches = block[start] | _LOWER_CASE == _N
    matches &= block[start + 1] | _LOWER_CASE == _A
    matches &= block[start + 2] | _LOWER_CASE == _N
    return bool(matches)


@kernel
def scaled_by_power(significand: np.uint64, exponent: int) -> float:
    """Returns significand * 10^exponent, for an exponent within +-270, as the nearest float64."""
    high = np.float64(significand)
    if significand <= _EXACT and abs(exponent) <= _EXACT_EXPONENT:
        power = _HIGH[_MAX_EXPONENT + abs(exponent)]
        return float(high / power if exponent < 0 else high * power)
    # If `high` is larger than the significand, the difference wraps around to the right negative int64.
    low = np.float64(np.int64(significand - np.uint64(high)))
    power, power_low = _HIGH[_MAX_EXPONENT + exponent], _LOW[_MAX_EXPONENT + exponent]
    product = high * power
    split = _SPLITTER * high
    a = split - (split - high)
    split = _SPLITTER * power
    b = split - (split - power)
    error = ((a * b - product) + a * (power - b) + (high - a) * b) + (high - a) * (power - b)
    return float(product + (error + (high * power_low + low * power)))


@kernel
def parse_exponent(block: NDArray[np.uint8], start: int, stop: int) -> tuple[int, bool]:
    """Returns the exponent in `block[start:stop]`, such as "e-5" or nothing, and whether it is valid."""
    if start == stop:
        return 0, True
    is_negative = block[start + 1] == _MINUS
    is_signed = is_negative | (block[start + 1] == _PLUS)
    first_digit = start + 1 + is_signed
    is_valid = (block[start] | _LOWER_CASE == _E) & (first_digit < stop)
    exponent = 0
    for position in range(first_digit, stop):
        digit = block[position] - _ZERO
        is_valid &= digit <= 9
        exponent = min(exponent * 10 + int(np.int64(digit)), 1_000_000)
    return (-exponent if is_negative else exponent), is_valid


@kernel
def parse_magnitude(block: NDArray[np.uint8], start: int, stop: int) -> tuple[float, bool]:
    """Returns the unsigned decimal in `block[start:stop]`, and whether it is valid and finite."""
    significand = np.uint64(0)
    exponent = 0
    num_digits = 0
    after_point = False
    position = start
    while position < stop:
        digit = block[position] - _ZERO
        if digit <= 9:
            num_digits += 1
            if significand < _ROOM:
                significand = significand * np.uint64(10) + np.uint64(digit)
                exponent -= after_point
            else:
                exponent += not after_point
        elif block[position] == _POINT and not after_point:
            after_point = True
        else:
            break
        position += 1
    written, is_valid = parse_exponent(block, position, stop)
    if num_digits == 0 or not is_valid:
        return np.nan, False
    exponent += written
    if significand == 0:
        return 0.0, True
    exponent = min(max(exponent, _LEAST_EXPONENT), _GREATEST_EXPONENT)
    inner = min(max(exponent, -_MAX_EXPONENT), _MAX_EXPONENT)
    magnitude = scaled_by_power(significand, inner)
    if inner != exponent:
        magnitude = scale_further(magnitude, exponent - inner)
    return magnitude, not np.isinf(magnitude)


@kernel
def scale_further(magnitude: float, exponent: int) -> float:
    """Returns magnitude * 10^exponent, for an exponent within +-130."""
    power = _HIGH[_MAX_EXPONENT + abs(exponent)]
    return float(magnitude / power if exponent < 0 else magnitude * power)


@kernel
def parse_decimal(block: NDArray[np.uint8], start: int, stop: int) -> tuple[float, bool]:
    """Returns the decimal in `block[start:stop]`, and whether it is valid; "nan" is, "inf" is not.

    The result is the nearest float64 if the exponent of its digits as a whole number is within +-270, else
    within 3 units in the last place. Digits after the 19th do not break ties.
    """
    is_negative = block[start] == _MINUS
    is_signed = is_negative | (block[start] == _PLUS)
    magnitude, is_valid = parse_magnitude(block, start + is_signed, stop)
    if not is_valid:
        return np.nan, is_nan(block, start, stop)
    return (-magnitude if is_negative else magnitude), True
