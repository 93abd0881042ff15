"""Clocks of workers, and who is behind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ProtocolError
from ps_server.coordination.clocks import Clocks

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["advance", "pause", "restart"]), st.integers(0, 2), st.integers(0, 9)
    )
)


@given(calls=CALLS, at_least=st.integers(0, 9))
def test_behind_are_those_that_train_and_have_not_said_so(calls, at_least: int) -> None:
    """A worker has finished the most that it said since it last left a barrier."""
    pace = Clocks(3)
    said: dict[int, list[int] | None] = {worker: [] for worker in range(3)}
    for call, worker, clock in calls:
        if call == "advance":
            pace.advance(worker, clock, 0)
            said[worker] = None if said[worker] is None else [*said[worker], clock]
        elif call == "pause":
            pace.pause(worker)
            said[worker] = None
        else:
            pace.restart(worker)
            said[worker] = []

    clocks = {worker: max(own, default=0) for worker, own in said.items() if own is not None}
    assert pace.behind(at_least) == {
        worker: clock for worker, clock in clocks.items() if clock < at_least
    }
    assert pace.slowest() == (min(clocks.values()) if clocks else None)


def test_worker_that_is_done_holds_up_nobody() -> None:
    pace = Clocks(2)
    pace.advance(0, 5, 5)
    assert pace.behind(5) == {1: 0}

    pace.leave(1)

    assert pace.behind(5) == {}
    assert pace.slowest() == 5


@pytest.mark.parametrize("worker", [1, 2, -1])
def test_who_is_done_or_unknown_is_refused_and_changes_nothing(worker: int) -> None:
    pace = Clocks(2)
    pace.leave(1)

    with pytest.raises(ProtocolError, match=rf"worker {worker} has finished 3 steps, but .*\[0\]"):
        pace.advance(worker, 3, 0)

    assert pace.behind(9) == {0: 0}


def test_worker_that_would_wait_for_itself_is_refused_and_changes_nothing() -> None:
    pace = Clocks(1)

    with pytest.raises(ProtocolError, match="it would wait for itself"):
        pace.advance(0, 3, 4)

    assert pace.slowest() == 0
