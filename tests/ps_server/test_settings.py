"""Settings of a server: when it ends, and values that are refused."""

import math
from typing import Any

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_server.settings import ServerSettings, bytes_of_size


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [
        ({}, 600.0),
        ({"stay": True}, None),
        ({"idle_limit_s": 0.0}, None),
        ({"idle_limit_s": 5.0}, 5.0),
        ({"idle_limit_s": 5.0, "stay": True}, 5.0),
    ],
    ids=str,
)
def test_server_ends_idle_unless_it_stays_or_the_limit_is_0(
    given: dict[str, Any], limit_s: float | None
) -> None:
    assert ServerSettings(**given).ends_idle_after_s == limit_s


@pytest.mark.parametrize("name", ["idle_limit_s", "wait_limit_s", "grace_s", "linger_s"])
@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_limit_that_is_no_number_of_seconds_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(UsageError, match=f"{name} is {seconds!r}, expected at least 0 seconds"):
        ServerSettings(**{name: seconds})


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1", 1),
        ("4096", 4096),
        ("8G", 8 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2kb", 2048),
        (" 1T ", 2**40),
    ],
)
def test_size_is_a_number_of_bytes(size: str, expected: int) -> None:
    assert bytes_of_size(size) == expected


@pytest.mark.parametrize("size", ["", "G", "-1", "8 G", "8X", "1e9", "8GG", "nan"])
def test_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(
        UsageError, match="is not a size: expected bytes, or a number with K, M, G or T"
    ):
        bytes_of_size(size)
