"""Who has the lock when, step by step."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from ctr_ps.protos.errors import WaitTimeoutError
from ctr_ps.ps_server.snapshot.phase_lock import PhaseLock

LIMIT_S = 10.0


class Holder:
    """One who asks for the lock in a thread of its own, and keeps it until told."""

    def __init__(self, asks_for: Callable[[], AbstractContextManager]) -> None:
        self._asks_for = asks_for
        self.wanted: Callable[[], bool] | None = None  # what it waits for
        self.has_come = threading.Event()  # it waits, or has the lock
        self.has_it = threading.Event()
        self.may_go = threading.Event()
        self.has_gone = threading.Event()

    def hold(self) -> None:
        with self._asks_for():
            self.has_it.set()
            self.has_come.set()
            assert self.may_go.wait(LIMIT_S)
        self.has_gone.set()

    @property
    def may_go_on(self) -> bool:
        return self.wanted is not None and self.wanted()

    def go(self) -> None:
        assert self.has_it.wait(LIMIT_S)
        self.may_go.set()
        assert self.has_gone.wait(LIMIT_S)


class Observed(threading.Condition):
    """The lock's condition: knows what each holder waits for, and notes who may go on at each change.

    Who of them goes first is up to the system, so a test that only sees who went misses a fault at times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, Holder] = {}
        self.able: list[list[Holder]] = []

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        holder = self.holders.get(threading.get_ident())
        if holder is None:
            return super().wait_for(predicate, timeout)
        holder.wanted = predicate
        holder.has_come.set()
        try:
            return super().wait_for(predicate, timeout)
        finally:
            holder.wanted = None

    def notify_all(self) -> None:
        self.able.append([holder for holder in self.holders.values() if holder.may_go_on])
        super().notify_all()


class Holders:
    """A lock, and those who ask for it one after another."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.lock = PhaseLock()
        self._condition = self.lock._changed = Observed()
        self._threads = threads

    def share(self) -> Holder:
        return self._start(Holder(self.lock.shared))

    def take_alone(self) -> Holder:
        return self._start(Holder(lambda: self.lock.alone(LIMIT_S)))

    def _start(self, holder: Holder) -> Holder:
        def hold() -> None:
            with self._condition:
                self._condition.holders[threading.get_ident()] = holder
            holder.hold()

        self._threads.submit(hold)
        assert holder.has_come.wait(LIMIT_S)
        return holder

    def end(self) -> None:
        """Lets all of a failed test go, so that it ends at once."""
        for holder in list(self._condition.holders.values()):
            holder.may_go.set()

    def waits(self, holder: Holder) -> bool:
        with self._condition:
            return holder.wanted is not None and not holder.wanted()

    def able_after(self, holder: Holder) -> list[Holder]:
        """Lets a holder go, and returns those who could go on at that moment."""
        num_changes = len(self._condition.able)
        holder.go()
        return self._condition.able[num_changes]


@pytest.fixture
def holders() -> Iterator[Holders]:
    with ThreadPoolExecutor(8) as threads:
        holders = Holders(threads)
        yield holders
        holders.end()


def test_many_share(holders: Holders) -> None:
    pushes = [holders.share() for _ in range(3)]

    assert all(push.has_it.wait(LIMIT_S) for push in pushes)
    for push in pushes:
        push.go()


def test_one_alone_waits_for_those_who_share(holders: Holders) -> None:
    first, second = holders.share(), holders.share()
    snapshot = holders.take_alone()
    assert holders.waits(snapshot)
    first.go()
    assert holders.waits(snapshot)

    assert holders.able_after(second) == [snapshot]

    snapshot.go()


def test_those_who_come_later_wait_behind_the_one_alone(holders: Holders) -> None:
    """So a stream of pushes does not starve a snapshot."""
    early = holders.share()
    snapshot = holders.take_alone()
    late = holders.share()
    assert holders.waits(snapshot)
    assert holders.waits(late)

    assert holders.able_after(early) == [snapshot]

    assert snapshot.has_it.wait(LIMIT_S)
    assert holders.waits(late)
    assert holders.able_after(snapshot) == [late]
    late.go()


def test_those_who_waited_to_share_go_before_the_next_one_alone(holders: Holders) -> None:
    """So a stream of snapshots does not starve the pushes."""
    snapshot = holders.take_alone()
    next_snapshot = holders.take_alone()
    pushes = [holders.share() for _ in range(2)]
    assert all(holders.waits(each) for each in (next_snapshot, *pushes))

    assert holders.able_after(snapshot) == pushes

    first, second = pushes
    first.go()
    assert holders.waits(next_snapshot)
    assert holders.able_after(second) == [next_snapshot]
    next_snapshot.go()


def test_one_alone_gives_up_in_time_and_holds_nobody_up(holders: Holders) -> None:
    holder = holders.share()
    late = pytest.raises(WaitTimeoutError, match=r"did not end within 0.01 s")

    with late, holders.lock.alone(0.01):
        pass

    other = holders.share()
    other.go()
    holder.go()
    holders.take_alone().go()


def test_error_of_a_holder_frees_the_lock() -> None:
    lock = PhaseLock()
    with pytest.raises(KeyError), lock.shared():
        raise KeyError
    with pytest.raises(KeyError), lock.alone(LIMIT_S):
        raise KeyError

    with lock.alone(LIMIT_S):
        pass
    with lock.shared():
        pass
