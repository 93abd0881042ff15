"""Numbers of a worker's pushes."""

import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from ps_worker.communicators.stamps import StampBook
from tests.support.training import together


@pytest.fixture
def _threads_take_turns_after_every_line() -> Iterator[None]:
    """Without a lock two threads would then read the same number; by chance they hardly ever do."""

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:
        os.sched_yield()
        return trace

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threading.settrace(trace)
    yield
    threading.settrace(None)  # type: ignore[arg-type]
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_threads_take_turns_after_every_line")
def test_numbers_have_no_gaps_across_threads() -> None:
    book = StampBook(worker=0)
    numbers: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for _ in range(100):
            mine.append(book.next(step=0, examples=1, batches=1, pulled=0).sequence)

    together(*(functools.partial(work, mine) for mine in numbers))

    assert sorted(number for mine in numbers for number in mine) == list(range(400))
    assert all(mine == sorted(mine) for mine in numbers)


def test_stamp_says_who_pushes_what() -> None:
    stamp = StampBook(worker=3).next(step=7, examples=32, batches=4, pulled=5)

    assert (stamp.worker, stamp.sequence, stamp.step, stamp.examples) == (3, 0, 7, 32)
    assert (stamp.batches, stamp.pulled) == (4, 5)


def test_incarnation_is_of_one_run_of_a_worker() -> None:
    book = StampBook(worker=0)
    first, second = (
        book.next(step=0, examples=1, batches=1, pulled=0).incarnation for _ in range(2)
    )

    assert first == second
    assert StampBook(worker=0).next(step=0, examples=1, batches=1, pulled=0).incarnation != first
