"""Waiting for what happens in its own time."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.005)
