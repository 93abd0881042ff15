"""Settings of a server: when it ends, and values that are refused."""

import math
from typing import Any

import pytest

from protos.errors import UsageError
from ps_server.settings import ServerSettings


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
    with pytest.raises(UsageError, match=f"{name} is {seconds!r}, expected seconds from 0 on"):
        ServerSettings(**{name: seconds})
