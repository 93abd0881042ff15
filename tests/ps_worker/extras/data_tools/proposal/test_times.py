"""Times in numbers and text: those are told whose later values no training has seen."""

import numpy as np
import pyarrow as pa
import pytest

from ctr_ps.ps_worker.extras.data_tools.proposal.times import (
    why_numbers_are_times,
    why_text_is_time,
)

NUMBERS = {
    "ts": ([1.6e9, 1.7e9], "since 1970"),
    "EVENT_TIME": ([1.6e12, 1.7e12], "since 1970"),
    "created_at": ([1.6e9, 1.7e9, 1.7e9 + 0.5, 1.65e9, 0], "since 1970"),  # 0 is unknown
    "hour": ([14102100, 14102123], "in digits, as 14102100"),
    "dt": ([20240101, 20241231], "in digits"),
    "eventDate": ([2024010123, 2024123100], "in digits"),
    "day": ([90101, 91231], "in digits"),  # of 2009
    "datetime": ([20240101235959, 20240101000000], "in digits"),
}
TEXTS = {
    "day": (["20240101", "20240102"], "in digits"),
    "DATE": (["20240101"] * 9 + ["unknown"], "in digits"),
    "ts": (["1600000000", "1600000001"], "since 1970"),
    "when": (["2026-01-01 10:00"] * 9 + ["unknown"], "times"),
}
NO_NUMBERS = {
    "hour": list(range(24)),
    "day": list(range(1, 32)),
    "dt": [20241301, 20240132],  # no month 13, no day 32
    "campaign": [20240101, 20240102],
    "candidate": [1.6e9, 1.7e9],
    "update_count": [1.6e9 + 1, 5],
    "time_spent": [3.5, 1200, 86399],
}
NO_TEXTS = {
    "day": ["Monday", "Tuesday"],
    "campaign": ["20240101", "20240102"],
    "hour": ["00", "23"],
    "code": ["2026-01-01"] * 7 + ["a", "b", "c"],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_times_are_told(name: str) -> None:
    values, reason = NUMBERS[name]

    assert reason in why_numbers_are_times(name, np.array(values, np.float64))


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_times_is_told(name: str) -> None:
    values, reason = TEXTS[name]

    assert reason in why_text_is_time(name, pa.array(values))


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_numbers_that_come_again_or_measure_are_no_times(name: str) -> None:
    assert not why_numbers_are_times(name, np.array(NO_NUMBERS[name], np.float64))


@pytest.mark.parametrize("name", NO_TEXTS)
def test_text_that_comes_again_is_no_time(name: str) -> None:
    assert not why_text_is_time(name, pa.array(NO_TEXTS[name]))
