"""Clocks of workers, and who is behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.ps_server.coordination.arrivals import Clocks
from ctr_ps.ps_server.coordination.membership import Membership

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


def test_worker_that_is_done_holds_up_nobody() -> None:
    clocks = Clocks(Membership(Members(2)))
    clocks.advance(0, 5, 5)
    assert clocks.behind(5) == {1: 0}

    leave(clocks, 1)

    assert clocks.behind(5) == {}
    assert clocks.slowest() == 5


@pytest.mark.parametrize("worker", [1, 2, -1])
def test_who_is_done_or_unknown_is_refused_and_changes_nothing(worker: int) -> None:
    clocks = Clocks(Membership(Members(2)))
    leave(clocks, 1)

    with pytest.raises(ProtocolError, match=rf"worker {worker} has finished 3 steps, but .*\[0\]"):
        clocks.advance(worker, 3, 0)

    assert clocks.behind(9) == {0: 0}


def test_worker_that_would_wait_for_itself_is_refused_and_changes_nothing() -> None:
    clocks = Clocks(Membership(Members(1)))

    with pytest.raises(ProtocolError, match="it would wait for itself"):
        clocks.advance(0, 3, 4)

    assert clocks.slowest() == 0


def leave(clocks: Clocks, worker: int) -> None:
    clocks._members.leave(worker)
    clocks.pause(worker)
