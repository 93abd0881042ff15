"""Which batches are joined, and when a heter trainer comes to a barrier."""

import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.store import Member, ReduceOp
from ctr_ps.protos.wire.heter import Attend
from ctr_ps.ps_worker.extras.heter.joining import Joined, Joining


def barrier(worker: int, number: int = 1) -> Attend:
    return Attend(member=Member(worker, 7), number=number, name="end", size=2, op=ReduceOp.SUM)


def test_synchronous_step_has_one_batch_of_each_in_worker_order() -> None:
    joining: Joining[str] = Joining([0, 2], is_sync=True, max_joined=1)

    joining.add(2, "two")
    assert joining.take() is None
    assert joining.missing() == [0]
    joining.add(0, "zero")

    assert joining.take() == Joined(["zero", "two"])
    assert joining.take() is None


def test_one_that_is_at_a_barrier_is_not_waited_for() -> None:
    joining: Joining[str] = Joining([0, 1], is_sync=True, max_joined=1)
    joining.attend(barrier(1))
    assert joining.take() is None
    joining.add(0, "zero")

    assert joining.take() == Joined(["zero"])

    joining.attend(barrier(0))
    assert joining.take() in (barrier(0), barrier(1))
    joining.add(0, "next")
    assert joining.take() is None  # the other one has left the barrier, too


def test_one_that_has_left_is_not_waited_for_and_its_batch_is_not_trained_on() -> None:
    joining: Joining[str] = Joining([0, 1, 2], is_sync=True, max_joined=1)
    joining.add(1, "one")
    joining.add(2, "two")

    assert joining.remove({0, 1}) == ["one"]

    assert joining.take() == Joined(["two"])


def test_otherwise_what_is_there_is_joined_up_to_a_limit() -> None:
    joining: Joining[int] = Joining([0, 1], is_sync=False, max_joined=2)
    for number in range(3):
        joining.add(1, number)
    joining.attend(barrier(0))

    assert joining.take() == Joined([0, 1])
    assert joining.take() == Joined([2])
    assert joining.take() is None  # worker 1 still trains
    joining.attend(barrier(1))
    assert isinstance(joining.take(), Attend)


@pytest.mark.parametrize(
    ("worker", "message"),
    [(0, r"second batch .* train\.thread_num = 1"), (3, r"serves the workers \[0, 1\]")],
)
def test_batch_that_breaks_the_step_is_refused(worker: int, message: str) -> None:
    joining: Joining[str] = Joining([0, 1], is_sync=True, max_joined=1)
    joining.add(0, "zero")

    with pytest.raises(ProtocolError, match=message):
        joining.add(worker, "another")


def test_what_was_sent_before_a_barrier_is_trained_on_before_it() -> None:
    joining: Joining[str] = Joining([0], is_sync=False, max_joined=1)
    joining.add(0, "zero")
    joining.attend(barrier(0))

    assert joining.take() == Joined(["zero"])
    assert joining.take() == barrier(0)


def test_barrier_of_those_that_are_lost_is_not_come_to() -> None:
    joining: Joining[str] = Joining([0, 1], is_sync=True, max_joined=1)
    joining.attend(barrier(1))

    joining.remove({0, 1})

    assert joining.take() is None
