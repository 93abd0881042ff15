"""Calls that wait for the thread that trains, and which it turns to: once each, answered once, in time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from ctr_ps.protos.errors import AbortedError, ProtocolError, TransportError, WaitTimeoutError
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import Member, ReduceOp
from ctr_ps.protos.wire.heter import Attend, Train, Trained
from ctr_ps.ps_worker.cluster.transport import Transport
from ctr_ps.ps_worker.extras.heter.connect import HeterTrainers
from ctr_ps.ps_worker.extras.heter.heter_job import HeterService
from ctr_ps.ps_worker.extras.heter.inbox import Inbox, Joining

LIMIT_S = 20.0


def batch(worker: int, number: int, settled: int = 0, incarnation: int = 5) -> Train:
    return Train(
        member=Member(worker, incarnation),
        number=number,
        settled=settled,
        dense=np.zeros((1, 1), np.float32),
        labels=np.zeros(1, np.float32),
        outputs={},
    )


def answer(loss: float) -> Trained:
    return Trained(loss=loss, probabilities=np.zeros(1, np.float32), grads={})


def inbox_of(*workers: int, is_sync: bool = False, wait_limit_s: float = LIMIT_S) -> Inbox:
    joining = Joining(workers, is_sync=is_sync, max_joined=8)  # type: ignore[var-annotated]
    return Inbox(joining, lambda _: None, barriers_passed=1, wait_limit_s=wait_limit_s)


def train_one(inbox: Inbox, loss: float) -> None:
    batches = inbox.next(LIMIT_S)
    assert isinstance(batches, list)
    batches[0].answer.set_result(answer(loss))


def test_a_batch_that_comes_again_is_trained_on_once_and_answered_alike() -> None:
    inbox = inbox_of(0)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(inbox.train, batch(0, 0)) for _ in range(2)]
        train_one(inbox, 3.0)
        assert [call.result(LIMIT_S).loss for call in calls] == [3.0, 3.0]

    assert inbox.train(batch(0, 0)).loss == 3.0
    assert inbox.next(0.0) is None


def test_an_answer_that_has_arrived_is_forgotten() -> None:
    inbox = inbox_of(0)
    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            call = pool.submit(inbox.train, batch(0, number, settled=number))
            train_one(inbox, number)
            assert call.result(LIMIT_S).loss == number

    with pytest.raises(ProtocolError, match="sent batch 0 again after its answer"):
        inbox.train(batch(0, 0))


def test_who_waits_for_others_too_long_is_told_for_whom() -> None:
    inbox = inbox_of(0, 1, is_sync=True, wait_limit_s=0.01)

    with pytest.raises(WaitTimeoutError, match=r"worker 0 waited 0\.01 s .* workers \[1\]"):
        inbox.train(batch(0, 0))


def test_all_calls_end_with_what_ends_the_job() -> None:
    inbox = inbox_of(0, 1, is_sync=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(inbox.train, batch(0, 0))
        while inbox.next(0.01) is None and not call.running():
            pass
        inbox.fail(AbortedError("worker 1 is gone"))
        with pytest.raises(AbortedError, match="worker 1 is gone"):
            call.result(LIMIT_S)

    with pytest.raises(AbortedError, match="worker 1 is gone"):
        inbox.train(batch(1, 0))


def test_a_barrier_is_answered_when_what_was_taken_before_has_been_pushed() -> None:
    inbox = inbox_of(0)
    barrier = Attend(member=Member(0, 5), number=1, name="end")
    with ThreadPoolExecutor(2) as pool:
        train = pool.submit(inbox.train, batch(0, 0))
        train_one(inbox, 1.0)
        train.result(LIMIT_S)
        is_told = threading.Event()
        attend = pool.submit(lambda: (is_told.set(), inbox.attend(barrier)))
        is_told.wait(LIMIT_S)
        assert not attend.done()  # its gradients are on their way to the servers

        found = inbox.next(LIMIT_S)
        attend.result(LIMIT_S)

    assert found == barrier
    inbox.attend(barrier)  # it comes again
    assert inbox.next(0.0) is None


def test_calls_that_wait_end_with_the_service() -> None:
    """Else their threads keep the process for as long as a call may wait."""
    inbox = inbox_of(0, 1, is_sync=True)
    with ThreadPoolExecutor(1) as pool:
        with HeterService("127.0.0.1:0") as service:
            service.start(inbox)
            call = pool.submit(inbox.train, batch(0, 0))
        with pytest.raises(TransportError, match="has ended"):
            call.result(LIMIT_S / 2)


class Watched(Joining[Any]):
    """Of two workers, of which one is awaited; tells when the other one's call has come."""

    def __init__(self) -> None:
        super().__init__([0, 1], is_sync=True, max_joined=8)
        self.has_call = threading.Event()

    def add(self, worker: int, batch: Any) -> None:
        super().add(worker, batch)
        self.has_call.set()

    def attend(self, barrier: Attend) -> None:
        super().attend(barrier)
        self.has_call.set()


def watched_inbox() -> tuple[Watched, Inbox]:
    joining = Watched()
    return joining, Inbox(joining, lambda _: None, barriers_passed=1, wait_limit_s=LIMIT_S)


def test_a_barrier_ends_with_what_ends_the_job() -> None:
    joining, inbox = watched_inbox()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(inbox.attend, Attend(member=Member(0, 5), number=1, name="end"))
        assert joining.has_call.wait(LIMIT_S)
        inbox.fail(AbortedError("worker 1 is gone"))
        with pytest.raises(AbortedError, match="worker 1 is gone"):
            call.result(LIMIT_S / 2)


def test_call_of_a_worker_that_is_lost_ends() -> None:
    joining, inbox = watched_inbox()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(inbox.train, batch(0, 0))
        assert joining.has_call.wait(LIMIT_S)
        assert inbox.remove([0])
        with pytest.raises(ProtocolError, match="worker 0 has left"):
            call.result(LIMIT_S / 2)


def test_another_process_of_a_worker_counts_from_its_own_first_batch() -> None:
    inbox = inbox_of(0)
    with ThreadPoolExecutor(1) as pool:
        for incarnation in (5, 6):
            call = pool.submit(inbox.train, batch(0, 0, incarnation=incarnation))
            train_one(inbox, incarnation)
            assert call.result(LIMIT_S).loss == incarnation


def test_a_worker_says_which_answers_have_arrived() -> None:
    """Else all are kept."""
    settled: list[int] = []

    class Answering:
        shard_map = ShardMap.of(1, ["127.0.0.1:1"])

        def call(self, server: int, call: object, batch: Train) -> Answered[Trained]:
            settled.append(batch.settled)
            return Answered(answer(1.0))

    trainers = HeterTrainers(cast(Transport, Answering()), worker=0, takes_over=False)
    for _ in range(3):
        trainers.train(np.zeros((1, 1), np.float32), np.zeros(1, np.float32), {})

    assert settled == [0, 1, 2]


def barrier(worker: int, number: int = 1) -> Attend:
    return Attend(member=Member(worker, 7), number=number, name="end", size=2, op=ReduceOp.SUM)


def test_synchronous_step_has_one_batch_of_each_in_worker_order() -> None:
    joining: Joining[str] = Joining([0, 2], is_sync=True, max_joined=1)

    joining.add(2, "two")
    assert joining.take() is None
    assert joining.missing() == [0]
    joining.add(0, "zero")

    assert joining.take() == ["zero", "two"]
    assert joining.take() is None


def test_one_that_is_at_a_barrier_is_not_waited_for() -> None:
    joining: Joining[str] = Joining([0, 1], is_sync=True, max_joined=1)
    joining.attend(barrier(1))
    assert joining.take() is None
    joining.add(0, "zero")

    assert joining.take() == ["zero"]

    joining.attend(barrier(0))
    assert joining.take() in (barrier(0), barrier(1))
    joining.add(0, "next")
    assert joining.take() is None  # the other one has left the barrier, too


def test_one_that_has_left_is_not_waited_for_and_its_batch_is_not_trained_on() -> None:
    joining: Joining[str] = Joining([0, 1, 2], is_sync=True, max_joined=1)
    joining.add(1, "one")
    joining.add(2, "two")

    assert joining.remove({0, 1}) == ["one"]

    assert joining.take() == ["two"]


def test_otherwise_what_is_there_is_joined_up_to_a_limit() -> None:
    joining: Joining[int] = Joining([0, 1], is_sync=False, max_joined=2)
    for number in range(3):
        joining.add(1, number)
    joining.attend(barrier(0))

    assert joining.take() == [0, 1]
    assert joining.take() == [2]
    assert joining.take() is None  # worker 1 still trains
    joining.attend(barrier(1))
    assert isinstance(joining.take(), Attend)


@pytest.mark.parametrize(
    ("worker", "message"),
    [(0, r"second batch .* train\.thread_num = 1"), (3, r"serves only the workers \[0, 1\]")],
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

    assert joining.take() == ["zero"]
    assert joining.take() == barrier(0)


def test_barrier_of_those_that_are_lost_is_not_come_to() -> None:
    joining: Joining[str] = Joining([0, 1], is_sync=True, max_joined=1)
    joining.attend(barrier(1))

    joining.remove({0, 1})

    assert joining.take() is None
