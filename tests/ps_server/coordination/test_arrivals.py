"""Who has come to a barrier, who is missing, when all may go on; and how far workers are between barriers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import PlaceLostError, ProtocolError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.limits import MAX_BARRIERS
from ctr_ps.protos.role import Members
from ctr_ps.ps_server.coordination.arrivals import Arrivals, Clocks
from ctr_ps.ps_server.coordination.membership import Membership
from ctr_ps.ps_server.coordination.steps import StepAggregator


class Barriers:
    """Arrivals of workers, and which of them have been answered, by barrier."""

    def __init__(self, num_workers: int) -> None:
        self.members = Membership(Members(num_workers))
        self.arrivals = Arrivals(self.members, StepAggregator(self.members))
        self.futures: dict[tuple[str, int], WaitingFuture[int]] = {}

    def arrive(self, name: str, *workers: int) -> None:
        for worker in workers:
            future: WaitingFuture[int] = WaitingFuture(0.0, lambda _: pytest.fail("waits"))
            self.arrivals.arrive(name, worker, 0, None, None, future)
            self.futures[name, worker] = future

    def give_up(self, name: str, worker: int) -> None:
        self.arrivals.give_up(name, worker, self.futures.pop((name, worker)))

    def leave(self, worker: int) -> None:
        self.members.leave(worker)
        for future in self.arrivals.take(worker):
            future.set_exception(PlaceLostError("left"))

    def released(self) -> dict[str, list[int]]:
        """Returns the workers that are answered now, by barrier, or raises what they are answered."""
        for answer in self.arrivals.take_released():
            answer()
        done = [place for place, future in self.futures.items() if future.done()]
        answered: dict[str, list[int]] = {}
        for name, worker in sorted(done):
            if not isinstance(self.futures[name, worker].exception(), PlaceLostError):
                assert self.futures[name, worker].result() == 0
                answered.setdefault(name, []).append(worker)
            del self.futures[name, worker]
        return answered


def test_barrier_is_released_when_all_members_have_come_and_is_forgotten() -> None:
    barriers = Barriers(3)
    for worker in (2, 0):
        barriers.arrive("pass", worker)
        assert barriers.released() == {}
    assert barriers.arrivals.missing() == {"pass": [1]}

    barriers.arrive("pass", 1)

    assert barriers.released() == {"pass": [0, 1, 2]}
    assert barriers.released() == {}
    barriers.arrive("pass", 0)
    assert barriers.released() == {}
    assert barriers.arrivals.missing() == {"pass": [1, 2]}


def test_barriers_of_different_names_do_not_mix() -> None:
    barriers = Barriers(3)
    barriers.arrive("start", 0)
    barriers.arrive("end", 1)

    assert barriers.released() == {}
    assert barriers.arrivals.places_of_missing("start") == {1: "end", 2: None}
    barriers.arrive("start", 1, 2)
    assert barriers.released() == {"start": [0, 1, 2]}
    assert barriers.arrivals.missing() == {"end": [0, 2]}


def test_nobody_waits_once_all_are_done() -> None:
    barriers = Barriers(2)
    barriers.arrive("pass", 0)
    barriers.leave(0)
    barriers.leave(1)

    assert barriers.released() == {}


@pytest.mark.parametrize("worker", [1, 2, -1])
def test_who_is_done_or_unknown_is_refused_and_changes_nothing(worker: int) -> None:
    barriers = Barriers(2)
    barriers.leave(1)

    with pytest.raises(ProtocolError, match=rf"worker {worker} called barrier 'pass'.*\[0\]"):
        barriers.arrive("pass", worker)
    with pytest.raises(ProtocolError, match=rf"worker {worker} has finished 3 steps, but .*\[0\]"):
        barriers.arrivals.clocks.advance(worker, 3, 0)

    barriers.arrive("pass", 0)
    assert barriers.released() == {"pass": [0]}


def test_worker_at_more_barriers_than_it_can_have_lost_calls_is_refused() -> None:
    barriers = Barriers(2)
    for number in range(MAX_BARRIERS):
        barriers.arrive(f"barrier-{number}", 0)

    with pytest.raises(
        ProtocolError, match="'one-more', but still waits at 8 others, such as 'barrier-0'"
    ):
        barriers.arrive("one-more", 0)

    barriers.arrive("barrier-0", 0)
    barriers.arrive("one-more", 1)
    barriers.give_up("barrier-1", 0)
    barriers.arrive("one-more", 0)
    assert barriers.released() == {"one-more": [0, 1]}


def test_barrier_at_which_nobody_waits_any_more_is_forgotten() -> None:
    barriers = Barriers(2)
    for number in range(100):
        barriers.arrive(f"barrier-{number}", 0)
        barriers.give_up(f"barrier-{number}", 0)
    barriers.arrive("last", 1)
    barriers.leave(1)

    assert not barriers.arrivals._waiting


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["advance", "pause", "restart"]), st.integers(0, 2), st.integers(0, 9)
    )
)


@given(calls=CALLS, at_least=st.integers(0, 9))
def test_behind_are_those_that_train_and_have_not_said_so(calls, at_least: int) -> None:
    """A worker has finished the most that it said since it last left a barrier."""
    clocks = Clocks(Membership(Members(3)))
    said: dict[int, list[int] | None] = {worker: [] for worker in range(3)}
    for call, worker, clock in calls:
        if call == "advance":
            clocks.advance(worker, clock, 0)
            said[worker] = None if said[worker] is None else [*said[worker], clock]
        elif call == "pause":
            clocks.pause(worker)
            said[worker] = None
        else:
            clocks.restart(worker)
            said[worker] = []

    expected = {worker: max(own, default=0) for worker, own in said.items() if own is not None}
    assert clocks.behind(at_least) == {
        worker: clock for worker, clock in expected.items() if clock < at_least
    }
    assert clocks.slowest() == (min(expected.values()) if expected else None)


def test_worker_that_would_wait_for_itself_is_refused_and_changes_nothing() -> None:
    clocks = Clocks(Membership(Members(1)))

    with pytest.raises(ProtocolError, match="it waits for itself"):
        clocks.advance(0, 3, 4)

    assert clocks.slowest() == 0
