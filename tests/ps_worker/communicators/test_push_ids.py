"""Numbers of a worker's pushes."""

import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from protos.store import WorkerProgress
from ps_worker.communicators.push_ids import UNNUMBERED, StampBook
from ps_worker.data.blocks.position import DataPosition
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


def pushed(book: StampBook, *whole: int) -> tuple[int, str]:
    stamp = book.next(examples=1, batches=len(whole), pulled=0, whole=whole)
    return stamp.step, stamp.position


@pytest.mark.usefixtures("_threads_take_turns_after_every_line")
def test_numbers_have_no_gaps_across_threads() -> None:
    book = StampBook(worker=0)
    numbers: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for _ in range(100):
            mine.append(book.next(examples=1, batches=1, pulled=0, whole=[]).sequence)

    together(*(functools.partial(work, mine) for mine in numbers))

    assert sorted(number for mine in numbers for number in mine) == list(range(400))
    assert all(mine == sorted(mine) for mine in numbers)


def test_stamp_says_who_pushes_what() -> None:
    stamp = StampBook(worker=3).next(examples=32, batches=4, pulled=5, whole=[])

    assert (stamp.worker, stamp.sequence, stamp.step, stamp.examples) == (3, 0, 0, 32)
    assert (stamp.batches, stamp.pulled) == (4, 5)


def test_incarnation_is_of_one_run_of_a_worker() -> None:
    book = StampBook(worker=0)
    first, second = (
        book.next(examples=1, batches=1, pulled=0, whole=[]).incarnation for _ in range(2)
    )

    assert first == second
    assert StampBook(worker=0).next(examples=1, batches=1, pulled=0, whole=[]).incarnation != first


def test_stamp_says_where_the_data_goes_on_after_the_batches_that_are_whole() -> None:
    book = StampBook(worker=0)
    places = [DataPosition(skip=skip) for skip in range(4)]
    numbers = [book.take(place) for place in places]

    said = [pushed(book, *whole) for whole in ([], [2], [1], [4], [3])]

    after = [place.to_json() for place in places]
    assert numbers == [1, 2, 3, 4]
    assert said == [(0, ""), (0, ""), (2, after[1]), (2, after[1]), (4, after[3])]


def test_batch_without_a_position_has_none() -> None:
    book = StampBook(worker=0)
    numbers = [book.take(DataPosition()), book.take(None)]

    assert [pushed(book, number) for number in numbers][1] == (2, "")


def test_batch_without_a_number_is_passed_over() -> None:
    book = StampBook(worker=0)

    assert pushed(book, UNNUMBERED, book.take(None)) == (1, "")


def test_restarted_worker_counts_on() -> None:
    book = StampBook(worker=0)
    book.go_on(WorkerProgress(incarnation=5, sequence=7, step=20, position="there"))

    nothing = pushed(book)
    numbers = [book.take(None), book.take(DataPosition())]

    assert nothing == (20, "there")
    assert numbers == [21, 22]
    assert pushed(book, *numbers) == (22, DataPosition().to_json())
