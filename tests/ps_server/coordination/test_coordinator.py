"""Who waits for whom: what becomes of calls that wait. Orders of calls are test_store_steps.py's business."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import (
    AbortedError,
    CtrPsError,
    GradientError,
    JobError,
    LostPushesError,
    PlaceLostError,
    ProtocolError,
    WaitTimeoutError,
    WrongServerError,
)
from ctr_ps.protos.futures import Answered, WaitingFuture
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import (
    Acknowledged,
    Applied,
    Future,
    Joined,
    Lease,
    Member,
    Message,
    PushId,
    ReduceOp,
    WorkerLoss,
)
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.coordination.job_state import WaitingArrival
from ctr_ps.ps_server.coordination.pending_calls import answer_all
from ctr_ps.ps_server.coordination.push_ledger import progress_of
from ctr_ps.ps_server.coordination.steps import CompleteStep
from tests.support import stores
from tests.support.garbage import num_alive, without_collector
from tests.support.stores import INCARNATION, member


def workers_of(num_workers: int, wait_limit_s: float = 10.0, *, num_heter: int = 0) -> Coordinator:
    return Coordinator(
        Members(num_workers, num_heter),
        wait_limit_s=wait_limit_s,
        inbox_bytes=1000,
    )


def apply_on_arrival(workers: Coordinator, push_id: PushId) -> None:
    workers.pushes.begin_arrival(push_id)
    answer_all(workers.pushes.arrival_applied(push_id))


def enter_part(workers: Coordinator, push_id: PushId, step: int = 0) -> CompleteStep | None:
    """Enters a worker's part of a step, and returns the step to be applied then."""
    entered = workers.pushes.enter_part(Gradients(), push_id, step)
    answer_all(entered.answers)
    return entered.complete


def heard(workers: Coordinator, who: Member) -> None:
    if not workers.admit(who):
        workers.bring_back(who)


def push_id(worker: int = 0, *, batches: int = 1, pulled: int = 0) -> PushId:
    return replace(stores.push_id(worker, 0, batches=batches, pulled=pulled), incarnation=0)


def test_call_is_answered_without_the_lock() -> None:
    """The answer asks for what needs the lock."""
    workers = workers_of(1)
    waiting = workers.pushes.at_version(1, lambda: workers.status({}, None).version)

    apply_on_arrival(workers, push_id())

    assert waiting.result() == 1


def test_call_that_gave_up_is_forgotten() -> None:
    workers = workers_of(2, wait_limit_s=0.001)
    waiting = workers.pushes.at_version(1, lambda: pytest.fail("answered"))

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* step 0 .* workers \[0, 1\]"):
        waiting.result()
    apply_on_arrival(workers, push_id())


def test_call_that_was_cancelled_is_forgotten_by_the_next_change() -> None:
    workers = workers_of(1)
    waiting = workers.pushes.at_version(5, lambda: None)
    assert isinstance(waiting, WaitingFuture)
    remembered = weakref.ref(waiting)

    waiting.cancel()
    apply_on_arrival(workers, push_id())
    del waiting
    gc.collect()

    assert remembered() is None


def test_what_was_answered_is_freed_without_the_garbage_collector() -> None:
    workers = workers_of(2)
    with without_collector():
        for number in range(1, 4):
            for worker in range(2):
                workers.rendezvous.barrier("b", worker, step=0, number=number)
        workers.pushes.at_version(1, lambda: None)
        apply_on_arrival(workers, push_id())

        assert num_alive(WaitingFuture) == 0


def test_part_of_a_step_is_progress_when_the_step_is_applied() -> None:
    workers = workers_of(2)

    for worker in range(2):
        step = enter_part(workers, push_id(worker, batches=1 + worker))
    before = workers.applied()
    assert step is not None
    workers.pushes.step_applied(step)

    assert before == Applied()
    after = workers.applied()
    assert (after.version, after.batches) == (1, 3)
    assert after.workers.keys() == {0, 1}


def test_pushes_that_were_acknowledged_and_are_missing_are_an_error() -> None:
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    apply_on_arrival(workers, replace(push_id(), incarnation=INCARNATION))

    assert workers.admit(member(0), Acknowledged(pushes=1))

    with pytest.raises(LostPushesError, match=r"2 pushes acknowledged, but this server has 1"):
        workers.admit(member(0), Acknowledged(pushes=2))
    with pytest.raises(LostPushesError, match=r"1 push acknowledged, but this server has 0"):
        workers.admit(member(1), Acknowledged(pushes=1))


def test_parts_of_steps_that_were_acknowledged_and_are_missing_are_an_error() -> None:
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    enter_part(workers, replace(push_id(), incarnation=INCARNATION))

    assert workers.admit(member(0), Acknowledged(steps=1))

    with pytest.raises(LostPushesError, match="part of step 1 was acknowledged"):
        workers.admit(member(0), Acknowledged(steps=2))


def test_cut_of_a_move_waits_for_the_first_step_that_came_to_another_server() -> None:
    first, second = workers_of(1), workers_of(1)
    step = enter_part(first, push_id())
    assert step is not None
    first.pushes.step_applied(step)

    cut = first.pushes.seen()
    drained = second.pushes.when_drained(cut, lambda: "")
    assert isinstance(drained, WaitingFuture)
    assert isinstance(first.pushes.when_drained(cut, lambda: ""), Answered)

    step = enter_part(second, push_id())
    assert step is not None
    answer_all(second.pushes.step_applied(step).answers)
    assert drained.result() == cut


def test_server_that_knows_nobody_is_not_drained() -> None:
    """As one that has lost its disk: its rows would be taken for those of all pushes."""
    knows, wiped = joined_workers(WorkerLoss.WAIT, [], num_workers=1), workers_of(1)
    apply_on_arrival(knows, replace(push_id(), incarnation=INCARNATION))
    cut = knows.pushes.seen()
    assert isinstance(knows.pushes.when_drained(cut, lambda: ""), Answered)
    assert isinstance(wiped.pushes.when_drained(cut, lambda: ""), WaitingFuture)


@pytest.mark.parametrize(
    "call",
    [
        lambda workers: workers.join(
            replace(member(0), incarnation=INCARNATION + 1), {}, None, only_asks=True
        ),
        lambda workers: workers.rendezvous.barrier("b", 0, step=0),
        lambda workers: workers.rendezvous.all_reduce("r", 0, np.ones(1), ReduceOp.SUM, step=0),
        lambda workers: workers.rendezvous.advance(0, 1, at_least=1),
        lambda workers: workers.rendezvous.take("e", 0, received=0),
        lambda workers: workers.pushes.when_applied(1),
    ],
    ids=["join", "barrier", "all-reduce", "advance", "take", "version"],
)
def test_nobody_waits_at_a_server_whose_shards_have_moved_away(
    call: Callable[[Coordinator], Future[object]],
) -> None:
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    waits = call(workers)
    assert isinstance(waits, WaitingFuture)

    workers.move_away()
    with pytest.raises(WrongServerError, match="moved away"):
        waits.result(0.0)
    with pytest.raises(WrongServerError, match="moved away"):
        call(workers)


def test_cut_of_a_move_has_no_steps_of_pushes_on_arrival() -> None:
    workers = workers_of(1)
    apply_on_arrival(workers, push_id(batches=3))
    assert workers.pushes.seen().step == 0


def test_push_is_progress_when_it_is_applied() -> None:
    workers = workers_of(1)
    workers.pushes.begin_arrival(push_id())
    assert workers.applied() == Applied()

    answer_all(workers.pushes.arrival_applied(push_id()))

    after = workers.applied()
    assert (after.version, after.batches) == (1, 1)
    assert workers.status({}, None).progress == after.workers != {}


def test_pull_of_a_later_version_does_not_hide_that_a_step_was_applied() -> None:
    """It comes when the version is new and those who wait for it are still to be answered."""
    workers = workers_of(2, wait_limit_s=0.001)
    pull = workers.pushes.at_version(1, lambda: workers.pushes.version)
    for worker in range(2):
        step = enter_part(workers, push_id(worker))
    assert step is not None
    applied = workers.pushes.step_applied(step)

    workers.pushes.at_version(2, lambda: None)
    answer_all(applied.answers)

    assert pull.result() == 1


def test_time_out_while_a_step_is_applied_blames_no_worker() -> None:
    workers = workers_of(1, wait_limit_s=0.001)
    assert enter_part(workers, push_id()) is not None

    with pytest.raises(WaitTimeoutError, match="step 0 is still being applied; see the server's"):
        workers.pushes.at_version(1, lambda: None).result()
    with pytest.raises(WaitTimeoutError, match="all workers arrived, but steps were not applied"):
        workers.rendezvous.barrier("b", 0, step=1).result()


def test_chunk_of_a_stranger_is_refused() -> None:
    with pytest.raises(ProtocolError, match="this job has 1 worker"):
        workers_of(1).pushes.take(PushChunk([], [], 0, 2), push_id(3), None)


def test_push_that_comes_again_while_it_is_applied_is_answered_with_it() -> None:
    workers = workers_of(1)
    assert workers.pushes.begin_arrival(push_id())

    assert not workers.pushes.begin_arrival(push_id())
    again = workers.pushes.when_pushed(push_id(), None)
    assert isinstance(again, WaitingFuture)
    assert not again.done()
    answer_all(workers.pushes.arrival_applied(push_id()))

    assert again.result() == 1


def test_push_that_comes_again_while_it_fails_fails_too() -> None:
    """So it does not seem to be applied; its sender may send it once more."""
    workers = workers_of(1)
    workers.pushes.begin_arrival(push_id())
    again = workers.pushes.when_pushed(push_id(), None)

    workers.pushes.abandon_arrival(push_id())

    with pytest.raises(ProtocolError, match="push 0 of worker 0 failed"):
        again.result()
    assert workers.pushes.begin_arrival(push_id())


CHUNKS = [PushChunk([], [], number, 2) for number in range(2)]


def assembled_workers() -> Coordinator:
    """Returns a coordinator that has all chunks of a push, which is not entered yet."""
    workers = workers_of(1)
    assert workers.pushes.take(CHUNKS[0], push_id(), None).result() == 0
    assert workers.pushes.take(CHUNKS[1], push_id(), None) == CHUNKS
    return workers


@pytest.mark.parametrize("step", [None, 0], ids=["async", "sync"])
def test_chunk_that_comes_again_while_its_push_is_checked_is_answered_with_it(
    step: int | None,
) -> None:
    """As the first chunk of a push, it would be answered at once, even if that one is refused."""
    workers = assembled_workers()

    again = workers.pushes.take(CHUNKS[0], push_id(), step)
    assert isinstance(again, WaitingFuture)
    assert not again.done()
    if step is None:
        apply_on_arrival(workers, push_id())
    else:
        complete = enter_part(workers, push_id(), step)
        assert complete is not None
        assert not again.done()
        answer_all(workers.pushes.step_applied(complete).answers)

    assert again.result() == 1
    assert workers.waiting() == []


def test_chunk_that_comes_again_while_its_push_is_refused_is_refused() -> None:
    workers = assembled_workers()
    again = workers.pushes.take(CHUNKS[0], push_id(), None)

    workers.pushes.refuse(push_id(), GradientError("not finite"))

    with pytest.raises(GradientError, match="not finite"):
        again.result()
    with pytest.raises(GradientError, match="not finite"):
        workers.pushes.take(CHUNKS[1], push_id(), None)
    assert workers.waiting() == []


def test_part_of_a_step_that_comes_again_counts_once() -> None:
    workers = workers_of(2)
    for _ in range(2):
        assert enter_part(workers, push_id(0)) is None, "the other worker's part is missing"
    step = enter_part(workers, push_id(1))
    assert step is not None

    enter_part(workers, push_id(0))  # while it is applied
    again = workers.pushes.when_applied()
    assert isinstance(again, WaitingFuture)
    assert not again.done()
    answer_all(workers.pushes.step_applied(step).answers)
    enter_part(workers, push_id(0))  # after it was

    assert again.result() == 1
    assert [each.worker for each in step.push_ids] == [0, 1]
    assert workers.pushes.take_complete_step() is None
    assert workers.status({}, None).examples == {0: 1, 1: 1}


def joined_workers(policy: WorkerLoss, failures: list[str], num_workers: int = 3) -> Coordinator:
    workers = Coordinator(
        Members(num_workers), wait_limit_s=10.0, inbox_bytes=1000, on_failure=failures.append
    )
    for worker in range(num_workers):
        join(workers, member(worker), policy).result()
    return workers


def join(
    workers: Coordinator, who: Member, policy: WorkerLoss, *, only_asks: bool = False
) -> Future[Joined]:
    lease = Lease(seconds=3.0, on_worker_loss=policy)
    return workers.join(who, {}, lease, only_asks=only_asks)


def lose(workers: Coordinator, lost: int, num_workers: int = 3) -> None:
    """All workers but one give signs of life, until its lease is over."""
    assert workers.pass_time(2.9) == []
    for worker in set(range(num_workers)) - {lost}:
        heard(workers, member(worker))
    assert workers.pass_time(0.1) == [lost]
    workers.lose([lost])


def test_lost_worker_ends_the_job_if_that_is_to_fail() -> None:
    failures: list[str] = []
    workers = joined_workers(WorkerLoss.FAIL, failures)
    barrier = workers.rendezvous.barrier("b", 0, step=0)

    lose(workers, 1)

    with pytest.raises(CtrPsError, match=r"no call from workers \[1\] for 3 s \(cluster.lease_s"):
        barrier.result()
    assert len(failures) == 1
    assert workers.failure


def test_other_terms_end_a_job_only_while_workers_are_to_come() -> None:
    """A process started again with another job file does not end what the servers have."""
    failures: list[str] = []
    workers = joined_workers(WorkerLoss.WAIT, failures, num_workers=2)
    lease = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)
    lose(workers, 1, num_workers=2)

    with pytest.raises(JobError, match="PADDLE_TRAINERS_NUM"):
        workers.join(Member(1, INCARNATION + 1), Members(3).terms, lease)
    assert failures == []

    workers = Coordinator(
        Members(2), wait_limit_s=10.0, inbox_bytes=1000, on_failure=failures.append
    )
    with pytest.raises(JobError, match="PADDLE_TRAINERS_NUM"):
        workers.join(member(0), Members(3).terms, lease)
    assert len(failures) == 1


def test_others_go_on_without_a_lost_worker() -> None:
    """From the step on of which they do not have its part."""
    failures: list[str] = []
    workers = joined_workers(WorkerLoss.CONTINUE, failures)
    enter_part(workers, replace(push_id(1), incarnation=INCARNATION))

    lose(workers, 1)

    assert not workers.failure
    assert workers.pass_time(0.0) == [], "said once"
    barriers = [workers.rendezvous.barrier("b", worker, step=0) for worker in (0, 2)]
    assert workers.pushes.take_complete_step() is not None, "its part of step 0 counts"
    assert failures == []
    assert len(barriers) == 2


def test_job_does_not_go_on_without_the_first_worker() -> None:
    failures: list[str] = []
    workers = joined_workers(WorkerLoss.CONTINUE, failures)

    lose(workers, 0)

    assert len(failures) == 1
    assert "no call from workers [0]" in failures[0]
    assert "and the job cannot continue without worker 0" in failures[0]


def test_process_in_the_place_of_a_lost_one_is_told_where_that_one_was() -> None:
    failures: list[str] = []
    workers = joined_workers(WorkerLoss.WAIT, failures, num_workers=2)
    for number, name in enumerate(("start", "pass"), 1):
        for worker in range(2):
            workers.rendezvous.barrier(name, worker, step=0, number=number)

    replacement = Member(1, INCARNATION + 1)
    asks = join(workers, replacement, WorkerLoss.WAIT, only_asks=True)
    assert isinstance(asks, WaitingFuture)
    assert not asks.done(), "the other may be alive"
    lose(workers, 1, num_workers=2)

    assert asks.result().barriers_passed == 2
    assert join(workers, replacement, WorkerLoss.WAIT).result().barriers_passed == 2
    assert not workers.failure
    heard(workers, replacement)
    with pytest.raises(ProtocolError, match="another process has taken the place of worker 1"):
        heard(workers, member(1))
    # It comes to the same barriers again, where nobody waits for it, and then to those of the others.
    assert workers.rendezvous.barrier("start", 1, step=0, number=1).result() == 0
    assert workers.rendezvous.barrier("pass", 1, step=0, number=2).result() == 0
    third = [workers.rendezvous.barrier("end", worker, step=0, number=3) for worker in range(2)]
    assert [each.result() for each in third] == [0, 0]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_process_in_the_place_of_one_at_a_barrier_comes_to_it_by_itself(
    is_waited_for: bool,
) -> None:
    """Worker 0 loads before the first barrier, and so does a process in its place."""
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    before = workers.rendezvous.all_reduce("start", 0, np.ones(1), ReduceOp.SUM, step=0, number=1)
    replacement = Member(0, INCARNATION + 1)
    if is_waited_for:
        join(workers, replacement, WorkerLoss.WAIT, only_asks=True)
    lose(workers, 0, num_workers=2)
    assert join(workers, replacement, WorkerLoss.WAIT).result().barriers_passed == 0

    other = workers.rendezvous.all_reduce("start", 1, np.ones(1), ReduceOp.SUM, step=0, number=1)

    assert not other.done()
    assert [each.worker for each in workers.waiting()] == [1]
    with pytest.raises(ProtocolError, match="another process took the place of worker 0"):
        before.result()
    workers.rendezvous.all_reduce("start", 0, np.full(1, 5.0), ReduceOp.SUM, step=0, number=1)
    assert other.result().values == 6.0


def test_step_does_not_wait_for_a_process_in_the_place_of_one_at_a_barrier() -> None:
    """That one had ended its steps; a server that is restarted meanwhile knows that, too."""
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    workers.rendezvous.barrier("pass", 0, step=0, number=1)
    lose(workers, 0, num_workers=2)
    join(workers, Member(0, INCARNATION + 1), WorkerLoss.WAIT).result()
    restarted = workers_of(2)
    restarted.restore(workers.state())

    for each in (workers, restarted):
        assert enter_part(each, replace(push_id(1), incarnation=INCARNATION)) is not None


def test_arrival_of_a_worker_that_went_on_from_another_barrier_is_not_in_the_state() -> None:
    """After a restart it would take the worker out of the steps in which it takes part again."""
    workers = workers_of(2)
    given_up = workers.rendezvous.barrier("a", 1, step=0, number=1)
    for worker in (1, 0):
        workers.rendezvous.barrier("b", worker, step=0, number=1)

    assert not given_up.done()
    assert workers.waiting() == []
    assert workers.state().absent_from == {}


def test_first_barrier_is_answered_after_many_passes_with_figures() -> None:
    """64 workers reduce 8,192 numbers after each pass; what the log has of them stays small."""
    num_workers, num_passes, figures = 64, 17, np.ones(8192)
    workers = workers_of(num_workers)
    for worker in range(num_workers):
        told = np.array([float(worker)])
        workers.rendezvous.all_reduce("start", worker, told, ReduceOp.MAX, step=0, number=1)
    for number in range(2, 2 + num_passes):
        for worker in range(num_workers):
            total = workers.rendezvous.all_reduce(
                "pass", worker, figures, ReduceOp.SUM, step=0, remember=False, number=number
            )
    assert total.result().values[0] == num_workers
    restarted = workers_of(num_workers)
    restarted.restore(workers.state())

    for each in (workers, restarted):
        first = each.rendezvous.all_reduce("start", 5, np.zeros(1), ReduceOp.MAX, step=0, number=1)
        assert first.result().values.tolist() == [num_workers - 1.0]
        passed = each.state().passed
        digits = sum(len(one.values or "") for one in passed)
        assert digits == 16 * (1 + figures.size), "of the last pass"


def test_all_reduce_is_remembered_if_one_worker_needs_it() -> None:
    workers = workers_of(2)
    for number in (1, 2):
        for worker in range(2):
            remember = worker == number == 1
            workers.rendezvous.all_reduce(
                "sum", worker, np.ones(1), ReduceOp.SUM, step=0, remember=remember, number=number
            )
    workers.rendezvous.barrier("end", 0, step=0, number=3)
    assert workers.waiting(), "until the other comes"
    workers.rendezvous.barrier("end", 1, step=0, number=3)

    again = [
        workers.rendezvous.all_reduce(
            "sum", 0, np.full(1, 5.0), ReduceOp.SUM, step=0, number=number
        )
        for number in (1, 2)
    ]

    assert [each.result().values.tolist() for each in again] == [[2.0], [5.0]]


@pytest.mark.parametrize("remember", [False, True])
def test_waiting_worker_says_whether_its_all_reduce_must_be_remembered(remember: bool) -> None:
    workers = workers_of(2)

    workers.rendezvous.all_reduce(
        "sum", 1, np.ones(1), ReduceOp.SUM, step=0, remember=remember, number=1
    )

    (arrival,) = workers.waiting()
    assert isinstance(arrival, WaitingArrival)
    assert arrival.remember == remember


def test_resumption_that_comes_late_forgets_no_push() -> None:
    """A push that completes no batch leaves the version as it was resumed."""
    workers = workers_of(1)
    workers.resume(5, {0: progress_of(replace(push_id(), step=4))}, batches=9)
    first = push_id(batches=0)
    apply_on_arrival(workers, first)

    workers.resume(5, {0: progress_of(replace(push_id(), step=4))}, batches=9)

    assert not workers.pushes.begin_arrival(first), "it was applied"
    assert (workers.pushes.version, workers.pushes.batches) == (5, 9)


@pytest.mark.parametrize("step", [0, None], ids=["sync", "async"])
def test_chunk_beyond_the_last_of_a_push_that_came_before_is_refused(step: int | None) -> None:
    workers = workers_of(1)
    if step is None:
        apply_on_arrival(workers, push_id())
    else:
        enter_part(workers, push_id(), step)

    with pytest.raises(ProtocolError, match="push 0 of worker 0 has chunk 2 of 2"):
        workers.pushes.take(PushChunk([], [], 2, 2), push_id(), step)


def replaced_worker() -> tuple[Coordinator, PushId, PushId]:
    """Returns workers of which another process has taken a place, and a push of the old and the new one."""
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    lose(workers, 1, num_workers=2)
    old = replace(push_id(1), incarnation=INCARNATION)
    new = replace(old, incarnation=INCARNATION + 1)
    join(workers, Member(1, new.incarnation), WorkerLoss.WAIT).result()
    return workers, old, new


def test_late_push_of_a_replaced_process_is_refused() -> None:
    """It was let in while the process had its place; those of the new one would be forgotten for it."""
    workers, old, new = replaced_worker()
    apply_on_arrival(workers, new)
    entries = (
        lambda: workers.pushes.begin_arrival(old),
        lambda: enter_part(workers, old, 1),
        lambda: workers.pushes.take(PushChunk([], [], 0, 2), old, None),
        lambda: workers.pushes.take(PushChunk([], [], 0, 2), old, 0),
    )

    for enter in entries:
        with pytest.raises(ProtocolError, match="another process has taken the place of worker 1"):
            enter()

    assert not workers.pushes.begin_arrival(new), "it was applied"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_late_push_of_a_worker_without_which_the_others_go_on_is_refused(
    is_restarted: bool,
) -> None:
    """It was let in before its worker was lost; after a restart no call of it is let in."""
    workers = joined_workers(WorkerLoss.CONTINUE, [])
    lose(workers, 1)
    late = replace(push_id(1), incarnation=INCARNATION)
    if is_restarted:
        state, workers = workers.state(), workers_of(3)
        workers.restore(state)

    for enter in (
        lambda: workers.pushes.begin_arrival(late),
        lambda: enter_part(workers, late),
        lambda: workers.admit(member(1)),
    ):
        with pytest.raises(PlaceLostError, match="and the other workers continued without it"):
            enter()


@pytest.mark.parametrize("is_applied", [True, False])
def test_push_that_ends_after_its_process_was_replaced_leaves_the_pushes_of_the_new_one(
    is_applied: bool,
) -> None:
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    old = replace(push_id(1), incarnation=INCARNATION)
    new = replace(old, incarnation=INCARNATION + 1)
    workers.pushes.begin_arrival(old)
    lose(workers, 1, num_workers=2)
    join(workers, Member(1, new.incarnation), WorkerLoss.WAIT).result()
    apply_on_arrival(workers, new)

    if is_applied:
        answer_all(workers.pushes.arrival_applied(old))
    else:
        workers.pushes.abandon_arrival(old)

    assert not workers.pushes.begin_arrival(new), "it was applied"


def test_process_in_the_place_of_one_that_has_left_comes_to_the_same_end() -> None:
    """That one was killed between the servers that it had to leave."""
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    for worker in range(2):
        workers.rendezvous.barrier("end", worker, step=0, number=1)
    workers.leave(1, step=0)

    replacement = Member(1, INCARNATION + 1)
    assert join(workers, replacement, WorkerLoss.WAIT).result().barriers_passed == 1

    heard(workers, replacement)
    assert workers.rendezvous.barrier("end", 1, step=0, number=1).result() == 0
    workers.leave(1, step=0)
    workers.leave(0, step=0)
    assert workers.all_left()


def test_process_whose_place_is_not_free_is_refused_when_the_other_is_alive() -> None:
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=2)
    joins = join(workers, Member(1, INCARNATION + 1), WorkerLoss.WAIT, only_asks=True)

    heard(workers, member(1))
    workers.pass_time(0.1)

    with pytest.raises(
        ProtocolError, match="another process, which is alive, has joined as worker 1"
    ):
        joins.result()


def test_restored_workers_are_where_they_were() -> None:
    """After steps, pushes on arrival, barriers and messages; with a worker that is lost and one that left."""
    workers = joined_workers(WorkerLoss.WAIT, [], num_workers=4)
    for worker in range(4):
        apply_on_arrival(workers, replace(push_id(worker, pulled=0), incarnation=INCARNATION))
    for worker in range(4):
        workers.rendezvous.barrier("pass", worker, step=4, number=1)
    workers.pushes.begin_arrival(ahead := replace(push_id(), incarnation=INCARNATION, sequence=2))
    answer_all(workers.pushes.arrival_applied(ahead))
    enter_part(workers, replace(push_id(1), incarnation=INCARNATION, sequence=3), step=5)
    workers.rendezvous.advance(0, 7, at_least=0)
    workers.rendezvous.post("rows", Message(sender=0, receiver=1, sequence=0, content=b"a"))
    workers.rendezvous.take("rows", 1, received=1)
    for worker in (0, 3):
        workers.rendezvous.take_file(worker, pass_number=2, num_files=5, received=0)
    workers.rendezvous.take_file(0, pass_number=2, num_files=5, received=1, waits=True)
    workers.leave(3, step=5)
    lose(workers, 2, num_workers=4)
    join(workers, Member(1, INCARNATION + 1), WorkerLoss.WAIT, only_asks=True)
    state = workers.state()
    fresh = workers_of(4).state()
    assert all(getattr(state, each.name) != getattr(fresh, each.name) for each in fields(state))

    restored = workers_of(4)
    restored.restore(state)

    assert restored.state() == state


def test_workers_that_others_wait_for_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    coordinator = workers_of(3)
    coordinator.rendezvous.barrier("start", 0, step=0)
    coordinator.rendezvous.barrier("start", 2, step=0)

    coordinator.pass_time(4.0)  # too short to be told
    coordinator.pass_time(2.0)
    coordinator.rendezvous.barrier("start", 1, step=0)
    enter_part(coordinator, push_id(worker=1))
    coordinator.pass_time(20.0)  # too soon after the last time
    coordinator.pass_time(20.0)
    coordinator.pass_time(40.0)

    assert caplog.messages == [
        "waiting for workers [1] at=barrier start waited_s=6",
        "waiting for workers [0, 2] at=step 0 waited_s=40",
        "waiting for workers [0, 2] at=step 0 waited_s=80",
    ]


def test_heter_trainers_that_others_wait_for_are_named_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    coordinator = workers_of(2, wait_limit_s=0.01, num_heter=1)
    start = coordinator.rendezvous.barrier("start", 0, step=0)
    coordinator.pass_time(6.0)

    with pytest.raises(WaitTimeoutError, match=r"workers \[1\], heter trainer 0 did not arrive"):
        start.result()
    enter_part(coordinator, push_id(worker=1))
    with pytest.raises(
        WaitTimeoutError, match="step 0 lacks the gradients of heter trainer 0; see"
    ):
        coordinator.pushes.at_version(1, lambda: None).result()

    assert caplog.messages == [
        "waiting for workers [1], heter trainer 0 at=barrier start waited_s=6"
    ]


def test_lost_heter_trainer_ends_the_job_by_its_name() -> None:
    coordinator = workers_of(2, num_heter=1)
    for worker in range(3):
        join(coordinator, member(worker), WorkerLoss.FAIL).result()

    lose(coordinator, 2)

    assert coordinator.failure.startswith("no call from heter trainer 0 for 3 s")
    with pytest.raises(AbortedError, match="heter trainer 0"):
        coordinator.pushes.at_version(1, lambda: None)


def test_heter_trainer_that_aborts_the_job_is_named() -> None:
    coordinator = workers_of(2, num_heter=2)

    coordinator.abort(3, "no memory")

    assert coordinator.failure == "heter trainer 1 aborted the job: no memory"


def differ(workers: Coordinator) -> None:
    with pytest.raises(JobError):
        workers.join(Member(1, 7), {"mode": "geo"}, None)


def fail_at_a_step(workers: Coordinator, error: Exception) -> None:
    enter_part(workers, push_id(0))
    step = enter_part(workers, push_id(1))
    assert step is not None
    workers.step_failed(step, error)


@pytest.mark.parametrize(
    ("fail", "has_log", "rule", "expected"),
    [
        (lambda workers: workers.abort(0, "no host"), True, WorkerLoss.WAIT, True),
        (lambda workers: workers.abort(0, "no host"), False, WorkerLoss.WAIT, False),
        (lambda workers: workers.abort(0, "no host"), True, WorkerLoss.CONTINUE, False),
        (lambda workers: workers.abort(0, "a", comes_again=True), True, WorkerLoss.WAIT, False),
        (differ, True, WorkerLoss.WAIT, False),
        (lambda workers: fail_at_a_step(workers, ValueError()), True, WorkerLoss.WAIT, False),
        (lambda workers: fail_at_a_step(workers, MemoryError()), True, WorkerLoss.WAIT, False),
    ],
)
def test_job_goes_on_from_update_logs_unless_its_error_would_come_again(
    fail: Callable[[Coordinator], None], has_log: bool, rule: WorkerLoss, expected: bool
) -> None:
    workers = Coordinator(Members(2), wait_limit_s=10.0, inbox_bytes=1000, has_update_log=has_log)
    lease = Lease(seconds=60.0, on_worker_loss=rule)
    workers.join(Member(0, push_id().incarnation), {"mode": "sync"}, lease)

    fail(workers)

    assert workers.can_resume is expected
    assert ("start all servers and workers again" in workers.failure) is expected
