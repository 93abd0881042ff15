"""Who has the lock when, step by step."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from protos.errors import WaitTimeoutError
from ps_server.snapshot.phase_lock import PhaseLock

LIMIT_S = 10.0
SOON_S = 0.02  # for what must not happen: too short a wait hides a fault, but never makes one


class Holder:
    """One who asks for the lock in a thread of its own, and keeps it until told."""

    def __init__(
        self, threads: ThreadPoolExecutor, lock: Callable[[], AbstractContextManager]
    ) -> None:
        self.has_it = threading.Event()
        self._may_go = threading.Event()
        self._is_asking = threading.Event()
        self._end = threads.submit(self._hold, lock)
        assert self._is_asking.wait(LIMIT_S)

    def _hold(self, lock: Callable[[], AbstractContextManager]) -> None:
        self._is_asking.set()
        with lock():
            self.has_it.set()
            assert self._may_go.wait(LIMIT_S)

    @property
    def waits(self) -> bool:
        return not self.has_it.wait(SOON_S)

    def go(self) -> None:
        assert self.has_it.wait(LIMIT_S)
        self._may_go.set()
        self._end.result(LIMIT_S)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def lock() -> PhaseLock:
    return PhaseLock()


def alone(lock: PhaseLock) -> Callable[[], AbstractContextManager]:
    return lambda: lock.alone(LIMIT_S)


def test_many_share(threads: ThreadPoolExecutor, lock: PhaseLock) -> None:
    holders = [Holder(threads, lock.shared) for _ in range(3)]

    assert all(holder.has_it.wait(LIMIT_S) for holder in holders)
    for holder in holders:
        holder.go()


def test_one_alone_waits_for_those_who_share(threads: ThreadPoolExecutor, lock: PhaseLock) -> None:
    first, second = Holder(threads, lock.shared), Holder(threads, lock.shared)
    snapshot = Holder(threads, alone(lock))
    assert snapshot.waits
    first.go()
    assert snapshot.waits

    second.go()

    snapshot.go()


def test_those_who_come_later_wait_behind_the_one_alone(
    threads: ThreadPoolExecutor, lock: PhaseLock
) -> None:
    """So a stream of pushes does not starve a snapshot."""
    early = Holder(threads, lock.shared)
    snapshot = Holder(threads, alone(lock))
    assert snapshot.waits
    late = Holder(threads, lock.shared)
    assert late.waits

    early.go()

    assert snapshot.has_it.wait(LIMIT_S)
    assert late.waits
    snapshot.go()
    late.go()


def test_those_who_waited_to_share_go_before_the_next_one_alone(
    threads: ThreadPoolExecutor, lock: PhaseLock
) -> None:
    """So a stream of snapshots does not starve the pushes."""
    snapshot = Holder(threads, alone(lock))
    assert snapshot.has_it.wait(LIMIT_S)
    next_snapshot = Holder(threads, alone(lock))
    pushes = [Holder(threads, lock.shared) for _ in range(2)]
    assert next_snapshot.waits
    assert all(push.waits for push in pushes)

    snapshot.go()

    assert all(push.has_it.wait(LIMIT_S) for push in pushes)
    assert next_snapshot.waits
    for push in pushes:
        push.go()
    next_snapshot.go()


def test_one_alone_gives_up_in_time_and_holds_nobody_up(
    threads: ThreadPoolExecutor, lock: PhaseLock
) -> None:
    holder = Holder(threads, lock.shared)
    assert holder.has_it.wait(LIMIT_S)

    with pytest.raises(WaitTimeoutError, match=r"did not end within 0.01 s"), lock.alone(0.01):
        pass

    other = Holder(threads, lock.shared)
    other.go()
    holder.go()
    Holder(threads, alone(lock)).go()


def test_error_of_a_holder_frees_the_lock(lock: PhaseLock) -> None:
    with pytest.raises(KeyError), lock.shared():
        raise KeyError
    with pytest.raises(KeyError), lock.alone(LIMIT_S):
        raise KeyError

    with lock.alone(LIMIT_S):
        pass
    with lock.shared():
        pass
