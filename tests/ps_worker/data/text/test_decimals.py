"""Numbers read by kernels are those that Python reads."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctr_ps.ps_worker.data.text.decimals import parse_decimal, parse_key


def decimal(text: str) -> tuple[float, bool]:
    return parse_decimal(np.frombuffer(text.encode() + b"\n", np.uint8), 0, len(text))


def key(text: str) -> tuple[int, int]:
    number, stop = parse_key(np.frombuffer(text.encode() + b"\n", np.uint8), 0)
    return int(number), stop


@given(st.floats(allow_nan=False, allow_infinity=False))
@example(5e-324)
@example(1.7976931348623157e308)
def test_what_python_writes_is_read(number: float) -> None:
    read, is_valid = decimal(repr(number))

    assert is_valid
    if 1e-250 < abs(number) < 1e250 or number == 0:
        assert read == number
        assert math.copysign(1, read) == math.copysign(1, number)
    else:
        assert abs(read - number) <= 3 * math.ulp(number)


@given(
    st.from_regex(
        r"[+-]?([0-9]{1,30}(\.[0-9]{0,25})?|\.[0-9]{1,25})([eE][+-]?[0-9]{1,2})?", fullmatch=True
    )
)
def test_any_decimal_is_read_as_python_reads_it(text: str) -> None:
    read, is_valid = decimal(text)

    assert is_valid
    assert read == pytest.approx(float(text), rel=3e-16, abs=0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9007199254740993", 9007199254740992.0),
        ("9999999999999999999", 1e19),
        ("0." + "0" * 30 + "1" * 40, float("0." + "0" * 30 + "1" * 40)),
        ("1" * 40, float("1" * 40)),
        ("0e999999999999", 0.0),
        ("1e-999999999999", 0.0),
        ("0.3333333333333333", 1 / 3),
    ],
)
def test_long_numbers_are_rounded_to_the_nearest(text: str, number: float) -> None:
    assert decimal(text) == (number, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        *["-", "+", ".", "e5", "1e", "1e+", "1.2.3", "1_0", "0x1", "inf", "-nan", "1e400", "--1"],
        "1 ",
    ],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    assert not decimal(text)[1]


@pytest.mark.parametrize("text", ["nan", "NaN", "NAN"])
def test_nan_is_a_number_that_is_missing(text: str) -> None:
    read, is_valid = decimal(text)

    assert math.isnan(read)
    assert is_valid


@given(st.integers(0, 2**64 - 1))
@example(2**64 - 1)
@example(10**19)
def test_a_key_is_any_number_of_64_bits(number: int) -> None:
    assert key(str(number)) == (number, len(str(number)))


@given(st.integers(2**64, 10**25))
@example(2**64)
@example(29999999999999999999)
def test_larger_numbers_are_no_keys(number: int) -> None:
    assert key(str(number))[1] == 0


@pytest.mark.parametrize(("text", "stop"), [("", 0), ("x", 0), ("-1", 0), ("12x", 2), ("7 8", 1)])
def test_a_key_ends_where_its_digits_end(text: str, stop: int) -> None:
    assert key(text)[1] == stop
