"""Numbers of a worker's pushes."""

import functools
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from ctr_ps.protos.store import FILE, Member, WorkerProgress
from ctr_ps.ps_worker.communicators.push_ids import UNNUMBERED, PushIds
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.streams.stream_data import StreamPosition
from tests.support.stores import member
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


def pushed(tracker: PushIds, *whole: int) -> tuple[int, str]:
    push_id = tracker.next(examples=1, batches=len(whole), pulled=0, whole=whole)
    return push_id.step, push_id.position


@pytest.mark.usefixtures("_threads_take_turns_after_every_line")
def test_numbers_have_no_gaps_across_threads() -> None:
    tracker = PushIds(member())
    numbers: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for _ in range(100):
            mine.append(tracker.next(examples=1, batches=1, pulled=0, whole=[]).sequence)

    together(*(functools.partial(work, mine) for mine in numbers))

    assert sorted(number for mine in numbers for number in mine) == list(range(400))
    assert all(mine == sorted(mine) for mine in numbers)


def test_push_id_says_who_pushes_what() -> None:
    push_id = PushIds(member(3)).next(examples=32, batches=4, pulled=5, whole=[])

    assert (push_id.worker, push_id.sequence, push_id.step, push_id.examples) == (3, 0, 0, 32)
    assert (push_id.batches, push_id.pulled) == (4, 5)


def test_push_ids_have_the_incarnation_of_the_process_that_joined() -> None:
    tracker = PushIds(Member(0, 5))

    said = [tracker.next(examples=1, batches=1, pulled=0, whole=[]).incarnation for _ in range(2)]

    assert said == [5, 5]


def test_push_id_says_where_the_data_goes_on_after_the_batches_that_are_whole() -> None:
    tracker = PushIds(member())
    places = [DataPosition(skip=skip) for skip in range(4)]
    numbers = [tracker.take(place) for place in places]

    said = [pushed(tracker, *whole) for whole in ([], [2], [1], [4], [3])]

    after = [place.to_json() for place in places]
    assert numbers == [1, 2, 3, 4]
    assert said == [(0, ""), (0, ""), (2, after[1]), (2, after[1]), (4, after[3])]


def test_batch_without_a_position_has_none() -> None:
    tracker = PushIds(member())
    numbers = [tracker.take(DataPosition()), tracker.take(None)]

    assert [pushed(tracker, number) for number in numbers][1] == (2, "")


def test_batch_without_a_number_is_passed_over() -> None:
    tracker = PushIds(member())

    assert pushed(tracker, UNNUMBERED, tracker.take(None)) == (1, "")


def test_restarted_worker_counts_on() -> None:
    tracker = PushIds(member())
    tracker.resume(WorkerProgress(incarnation=5, sequence=7, step=20, position="there"))

    nothing = pushed(tracker)
    numbers = [tracker.take(None), tracker.take(DataPosition())]

    assert nothing == (20, "there")
    assert numbers == [21, 22]
    assert pushed(tracker, *numbers) == (22, DataPosition().to_json())


def test_a_push_has_the_places_of_the_batches_that_it_makes_whole() -> None:
    tracker = PushIds(Member(0, 1))
    for number, places in enumerate([{"a": "1", "b": ""}, {"a": "2"}, {"b": "5 +1"}, {"a": "3"}]):
        tracker.take(StreamPosition(epoch=1, rows=number, partitions=places))

    def partitions(*whole: int) -> dict[str, str]:
        push = tracker.next(examples=1, batches=len(whole), pulled=0, whole=whole)
        return dict(push.partitions)

    assert partitions(2) == {}
    assert partitions(1) == {"a": "2", "b": ""}
    assert partitions() == {}
    assert partitions(3, 4) == {"b": "5 +1", "a": "3"}


def test_the_first_push_of_a_resumed_worker_has_all_places() -> None:
    tracker = PushIds(Member(0, 1))
    tracker.resume(
        WorkerProgress(
            incarnation=7,
            sequence=3,
            step=4,
            position="x",
            partitions={"a": "1", "b": "2", f"{FILE}0": "1 07"},
        )
    )
    tracker.take(StreamPosition(epoch=1, partitions={"b": "3"}))

    first = tracker.next(examples=1, batches=0, pulled=0, whole=())
    second = tracker.next(examples=1, batches=1, pulled=0, whole=(5,))

    # Of files of a queue, servers keep what they have.
    assert first.partitions == {"a": "1", "b": "2"}
    assert second.partitions == {"b": "3"}
