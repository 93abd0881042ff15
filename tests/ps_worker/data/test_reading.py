"""Iterators in threads: all items once, the first error, and no thread left."""

import threading
import time
from collections.abc import Iterator

import pytest

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.reading import merged

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_items_of_all_sources_come_once_and_each_source_in_its_order() -> None:
    sources = [iter(range(start, start + 100)) for start in (0, 1000, 2000)]

    items = list(merged(sources, capacity=2))

    assert sorted(items) == [start + n for start in (0, 1000, 2000) for n in range(100)]
    for start in (0, 1000, 2000):
        own = [item for item in items if start <= item < start + 1000]
        assert own == sorted(own)


def test_nothing_comes_of_no_sources() -> None:
    assert list(merged([], capacity=1)) == []


def test_sources_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=LIMIT_S)

    def source() -> Iterator[int]:
        yield meeting.wait()

    assert sorted(merged([source() for _ in range(3)], capacity=1)) == [0, 1, 2]


def test_no_more_items_than_the_capacity_wait() -> None:
    num_made = 0
    is_full = threading.Event()

    def source() -> Iterator[int]:
        nonlocal num_made
        while True:
            num_made += 1
            if num_made == 5:  # one was taken, three wait, and this one finds no room
                is_full.set()
            yield num_made

    items = merged([source()], capacity=3)

    assert next(items) == 1
    assert is_full.wait(LIMIT_S)
    items.close()
    assert num_made == 5


def test_error_of_a_source_ends_the_iteration_and_the_other_sources() -> None:
    is_closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            is_closed.set()

    def broken() -> Iterator[int]:
        yield 2
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        for _ in merged([endless(), broken()], capacity=2):
            pass

    assert is_closed.is_set()


def test_dropped_iterator_ends_its_threads() -> None:
    items = merged([iter(range(100))], capacity=1)
    next(items)
    del items


def test_sources_that_give_nothing_are_not_waited_for_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_over = threading.Event()

    def stuck() -> Iterator[int]:
        is_over.wait(LIMIT_S)
        yield 1

    items = merged([stuck()], capacity=1, stall_limit_s=0.01, join_limit_s=0.01)
    with pytest.raises(DataError, match=r"no reader has read a row for 0\.01 s"):
        next(items)
    is_over.set()

    assert caplog.messages == ["abandoned a stuck reader: thread=reader-0"]
    for thread in threading.enumerate():
        if thread.name == "reader-0":
            thread.join(LIMIT_S)


def test_leaving_waits_for_all_that_are_stuck_together(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()

    def stuck() -> Iterator[int]:
        yield 1
        is_over.wait(LIMIT_S)

    items = merged([stuck() for _ in range(30)], capacity=30, join_limit_s=0.1)
    for _ in range(30):
        next(items)
    start = time.monotonic()
    items.close()
    waited = time.monotonic() - start
    is_over.set()

    assert waited < 1.5  # far below 30 times the limit
    assert len(caplog.messages) == 30
    for thread in threading.enumerate():
        if thread.name.startswith("reader-"):
            thread.join(LIMIT_S)
