"""Barriers of a store whose workers come again, or too late."""

import numpy as np
import pytest

from ctr_ps.protos.errors import PlaceLostError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import ReduceOp
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import push_id


def test_done_of_a_third_may_show_that_two_are_stuck() -> None:
    store = ParameterStore(num_workers=3, wait_limit_s=60)
    first, second = store.barrier("a", 0, step=0), store.barrier("b", 1, step=0)

    store.leave(2, step=0)

    for future in (first, second):
        with pytest.raises(ProtocolError, match="deadlock"):
            future.result()


def test_worker_that_leaves_while_its_call_waits_is_answered() -> None:
    store = ParameterStore(num_workers=3, wait_limit_s=60)
    waiting = store.barrier("a", 1, step=0)

    store.leave(1, step=0)

    with pytest.raises(PlaceLostError, match="worker 1 left or was lost during this call"):
        waiting.result()
    others = [store.barrier("a", worker, step=0) for worker in (0, 2)]
    assert [each.result() for each in others] == [0, 0]


def test_worker_that_comes_again_waits_on_when_its_first_call_gives_up() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=0.01)
    first = store.barrier("b", 0, step=0)
    second = store.barrier("b", 0, step=0)

    with pytest.raises(WaitTimeoutError, match=r"\[1\]"):
        first.result()
    last = store.barrier("b", 1, step=0)

    assert (second.result(), last.result()) == (0, 0)


def test_worker_that_gave_up_is_missing_again() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=0.01)

    with pytest.raises(WaitTimeoutError, match=r"workers \[1\]"):
        store.barrier("b", 0, step=0).result()
    with pytest.raises(WaitTimeoutError, match=r"workers \[0\]"):
        store.barrier("b", 1, step=0).result()


def test_number_of_a_worker_that_left_does_not_count() -> None:
    store = ParameterStore(num_workers=2)
    store.all_reduce("sum", 1, np.array([5.0]), ReduceOp.SUM, step=0)
    store.leave(1, step=0)

    reduced = store.all_reduce("sum", 0, np.array([1.0]), ReduceOp.SUM, step=0).result()

    assert reduced.values.tolist() == [1.0]


def test_numbers_may_be_changed_while_others_are_waited_for() -> None:
    store = ParameterStore(num_workers=2)
    numbers = np.array([1.0])
    first = store.all_reduce("sum", 0, numbers, ReduceOp.SUM, step=0)
    numbers[:] = 100.0

    store.all_reduce("sum", 1, numbers, ReduceOp.SUM, step=0)

    assert first.result().values.tolist() == [101.0]


def test_barrier_that_failed_lets_workers_train_on() -> None:
    """As the other servers of a cluster do, to which they came without numbers."""
    store = ParameterStore(num_workers=2)
    calls = [
        store.all_reduce("sum", worker, np.zeros(1 + worker), ReduceOp.SUM, step=0)
        for worker in range(2)
    ]
    for call in calls:
        with pytest.raises(ProtocolError, match="with different arguments"):
            call.result()

    for worker in range(2):
        store.push_grad(Gradients(), push_id(worker, 0, examples=0), at=0)

    assert store.status().version == 1


def test_call_that_waits_for_slower_workers_is_answered_when_all_meet() -> None:
    """A worker should have its answers first; but nobody trains, so nobody is behind."""
    store = ParameterStore(num_workers=2)
    waiting = store.advance(0, 9, at_least=7)

    for worker in range(2):
        store.barrier("epoch", worker, step=0)

    assert waiting.result() == 7
    assert store.advance(0, 1, at_least=0).result() == 0


def test_clock_from_before_a_barrier_that_comes_late_is_ignored() -> None:
    """A delayed copy of a call that was answered by another try."""
    store = ParameterStore(num_workers=2)
    for number in (1, 2):
        store.engine.job.rendezvous.advance(0, 9, at_least=0, after_barrier=number - 1).result()
        for worker in range(2):
            store.engine.job.rendezvous.barrier("epoch", worker, step=0, number=number)
    store.engine.job.rendezvous.advance(1, 3, at_least=0, after_barrier=2).result()

    store.engine.job.rendezvous.advance(0, 9, at_least=7, after_barrier=1).result()

    assert store.engine.job.rendezvous.advance(1, 3, at_least=0, after_barrier=2).result() == 0
    assert store.engine.job.rendezvous.advance(0, 2, at_least=0, after_barrier=2).result() == 2


def test_workers_that_wait_at_different_barriers_hear_of_it_at_once() -> None:
    store = ParameterStore(num_workers=3, wait_limit_s=60)
    waiting = [
        store.barrier("epoch-1", 0, step=0),
        store.all_reduce("loss", 1, np.array([1.0]), ReduceOp.SUM, step=0),
        store.barrier("epoch-1", 2, step=0),
    ]

    for future in waiting:
        with pytest.raises(ProtocolError, match=r"\[0, 2\] at 'epoch-1'; workers \[1\] at 'loss'"):
            future.result()
