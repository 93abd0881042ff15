"""One suite for every store: steps, versions, barriers, reductions and clocks."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ctr_ps.protos.errors import CtrPsError, ProtocolError, WaitTimeoutError
from ctr_ps.protos.store import Missing, ReduceOp, Store
from tests.support.stores import (
    INCARNATION,
    KEYS,
    OpenJob,
    assert_same_parameters,
    in_process,
    pull,
    push_id,
    random_gradients,
)

NOT_OF_THE_JOB = "worker 2 (called, but this job has 2 workers|has not joined the job)"


def train_steps(store: Store, worker: int, num_steps: int) -> None:
    for step in range(num_steps):
        pull(store, at=step)
        gradients = random_gradients(1000 * worker + step, examples=3 + worker)
        store.push_grad(gradients, push_id(worker, step, 3 + worker), at=step).result()
    store.leave(worker, step=num_steps)


def train_together(stores: list[Store], num_steps: list[int]) -> None:
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(train_steps, stores, range(len(stores)), num_steps))


@pytest.mark.parametrize("num_servers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "num_steps", [[4, 4, 4], [2, 5, 3], [4, 0, 1]], ids=["equal", "less", "none"]
)
def test_sync_model_depends_on_neither_timing_nor_servers(open_job, num_steps):
    """The reference gets the workers' parts in the other order, one after the other.

    Three workers, because the sum of two numbers is the same in either order.
    """
    stores = open_job(num_workers=3)
    reference = in_process(num_workers=3)

    train_together(stores, num_steps)
    for step in range(max(num_steps) + 1):
        for worker in (2, 1, 0):
            if step == num_steps[worker]:
                reference.leave(worker, step=step)
            elif step < num_steps[worker]:
                gradients = random_gradients(1000 * worker + step, examples=3 + worker)
                reference.push_grad(gradients, push_id(worker, step, 3 + worker), at=step).result()

    assert_same_parameters(reference, stores[0])
    status = stores[0].status()
    assert status.version == max(num_steps)
    assert status.left == {0, 1, 2}
    for worker, steps in enumerate(num_steps):
        assert status.examples.get(worker, 0) == (3 + worker) * steps


def test_pull_waits_for_its_version(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()

    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1)
    assert np.count_nonzero(pull(first)["wide"]) == 0
    second.push_grad(random_gradients(1), push_id(1), at=0).result()

    assert np.count_nonzero(pulled.result().rows["wide"]) > 0


def test_version_that_does_not_come_names_who_is_behind(open_job):
    first, _ = open_job(num_workers=2, wait_limit_s=0.1)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* workers \[1\]"):
        first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1).result()


def test_barrier_lets_all_go_on_at_one_version(open_job):
    """Worker 0 waits from step 1 on, so worker 1 takes steps 1 and 2 alone."""
    first, second = open_job(num_workers=2)
    versions: dict[int, int] = {}

    def wait() -> None:
        first.push_grad(random_gradients(0), push_id(0), at=0).result()
        versions[0] = first.barrier("pass", 0, step=1).result()

    thread = threading.Thread(target=wait)
    thread.start()
    for step in range(3):
        pull(second, at=step)
        second.push_grad(random_gradients(step), push_id(1, step), at=step).result()
    pull(second, at=3)  # worker 0 has come, or this would wait
    versions[1] = second.barrier("pass", 1, step=3).result()
    thread.join(10)

    assert versions == {0: 3, 1: 3}


def test_barrier_that_some_do_not_reach_names_them(open_job):
    first, *_ = open_job(num_workers=3, wait_limit_s=0.1)

    with pytest.raises(WaitTimeoutError, match=r"barrier 'pass': workers \[1, 2\] did not arrive"):
        first.barrier("pass", 0, step=0).result()


def test_barrier_does_not_wait_for_workers_that_are_done(open_job):
    first, second = open_job(num_workers=2)
    second.leave(1, step=0)

    assert first.barrier("pass", 0, step=0).result() == 0


def test_steps_go_on_after_a_barrier_where_pushes_on_arrival_ended(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0, batches=3)).result()

    meetings = [
        store.barrier("pass", worker, step=0) for worker, store in enumerate((first, second))
    ]
    assert [met.result() for met in meetings] == [3, 3]
    for worker, store in enumerate((first, second)):
        store.push_grad(random_gradients(1), push_id(worker, 1), at=3).result()

    assert pull(first, at=4)["wide"].any()
    assert first.status().version == 4


def test_worker_that_is_not_of_the_job_is_refused(open_job):
    first, _ = open_job(num_workers=2)
    before = first.digest()

    with pytest.raises(ProtocolError, match=NOT_OF_THE_JOB):
        first.leave(2, step=0)
    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        first.push_grad(random_gradients(0), push_id(2)).result()

    assert first.status().left == frozenset()
    assert first.digest() == before


def reduced(stores, each, op=ReduceOp.SUM, name="totals"):
    """Lets each worker come with its numbers, the last first; returns their calls by worker."""
    calls = {
        worker: stores[worker].all_reduce(name, worker, each[worker], op, step=0)
        for worker in reversed(range(len(stores)))
    }
    return [calls[worker] for worker in range(len(stores))]


@pytest.mark.parametrize("op", ReduceOp)
def test_numbers_are_reduced_in_worker_order(open_job, op):
    """Numbers whose sum shows the order in which they were added."""
    each = np.random.default_rng(0).normal(size=(3, 50)) * 10.0 ** np.arange(3)[:, None]
    together = {
        ReduceOp.SUM: each[0] + each[1] + each[2],
        ReduceOp.MAX: each.max(axis=0),
        ReduceOp.MIN: each.min(axis=0),
    }

    for call in reduced(open_job(num_workers=3), each, op):
        found = call.result()
        np.testing.assert_array_equal(together[op], found.values)
        assert found.version == 0
        assert not found.values.flags.writeable


def test_numbers_that_need_not_be_remembered_are_reduced_alike(open_job: OpenJob) -> None:
    stores = open_job(num_workers=2)

    calls = [
        store.all_reduce("totals", worker, np.ones(2), ReduceOp.SUM, step=0, remember=False)
        for worker, store in enumerate(stores)
    ]

    assert [call.result().values.tolist() for call in calls] == [[2.0, 2.0]] * 2


def test_no_number_and_what_is_none_go_through(open_job):
    stores = open_job(num_workers=2)
    each = [np.array([np.nan, np.inf, np.inf, -0.0]), np.array([1.0, 1.0, -np.inf, -0.0])]

    assert [call.result().values.size for call in reduced(stores, [np.zeros(0)] * 2)] == [0, 0]
    for call in reduced(stores, each):
        np.testing.assert_array_equal(call.result().values, [np.nan, np.inf, np.nan, -0.0])


def test_numbers_meet_at_the_version_where_the_others_have_come(open_job):
    """Worker 0 waits from step 1 on, so worker 1 takes step 1 alone."""
    first, second = open_job(num_workers=2)
    for worker, store in enumerate((first, second)):
        store.push_grad(random_gradients(0), push_id(worker), at=0).result()
    waiting = first.all_reduce("totals", 0, np.ones(1), ReduceOp.SUM, step=1)
    pull(second, at=1)
    second.push_grad(random_gradients(1), push_id(1, 1), at=1).result()
    pull(second, at=2)  # worker 0 has come, or this would wait

    last = second.all_reduce("totals", 1, np.ones(1), ReduceOp.SUM, step=2).result()

    assert (waiting.result().version, last.version) == (2, 2)
    assert last.values.tolist() == [2.0]


@pytest.mark.parametrize(
    ("fault", "told"),
    [("length", "3 numbers for SUM"), ("op", "2 numbers for MAX"), ("nothing", "nothing")],
)
def test_numbers_that_do_not_fit_are_an_error_for_all_and_free_the_name(open_job, fault, told):
    stores = open_job(num_workers=3)
    calls = [
        stores[worker].all_reduce("totals", worker, np.ones(2), ReduceOp.SUM, step=0)
        for worker in range(2)
    ]
    if fault == "nothing":
        calls.append(stores[2].barrier("totals", 2, step=0))
    else:
        op = ReduceOp.MAX if fault == "op" else ReduceOp.SUM
        size = 3 if fault == "length" else 2
        calls.append(stores[2].all_reduce("totals", 2, np.ones(size), op, step=0))

    for call in calls:
        with pytest.raises(
            ProtocolError, match=f"'totals' .* worker 1 2 numbers for SUM, worker 2 {told};"
        ):
            call.result()
    assert [call.result().values.tolist() for call in reduced(stores, np.ones((3, 1)))] == [
        [3.0]
    ] * 3


def test_numbers_of_another_kind_are_refused_before_anyone_waits(open_job):
    first, second = open_job(num_workers=2)

    with pytest.raises(ProtocolError, match="float32"):
        first.all_reduce("totals", 0, np.ones(2, np.float32), ReduceOp.SUM, step=0)

    assert [
        call.result().values.tolist() for call in reduced([first, second], np.ones((2, 1)))
    ] == [[2.0], [2.0]]


def test_worker_learns_how_far_the_slowest_is(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)

    assert first.advance(0, 5, at_least=0).result() == 0
    assert second.advance(1, 3, at_least=3).result() == 3
    assert first.advance(0, 5, at_least=-2).result() == 3


def test_worker_waits_until_the_slowest_is_far_enough(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    waiting = first.advance(0, 9, at_least=2)

    second.advance(1, 1, at_least=0).result()
    second.advance(1, 4, at_least=0).result()

    assert waiting.result() == 4


def test_nobody_waits_for_who_is_done(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    waiting = first.advance(0, 9, at_least=7)

    second.leave(1, step=0)

    assert waiting.result() == 9


def test_nobody_waits_for_who_waits_in_a_barrier(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    waiting = first.advance(0, 9, at_least=7)

    meeting = second.barrier("epoch", 1, step=0)

    assert waiting.result() == 9
    assert first.barrier("epoch", 0, step=0).result() == meeting.result() == 0


def test_workers_count_afresh_after_a_barrier(open_job: OpenJob) -> None:
    first, second = open_job(num_workers=2)
    first.advance(0, 9, at_least=0).result()
    second.advance(1, 9, at_least=0).result()
    for met in [first.barrier("epoch", 0, step=0), second.barrier("epoch", 1, step=0)]:
        met.result()

    assert first.advance(0, 1, at_least=0).result() == 0
    assert second.advance(1, 2, at_least=0).result() == 1


def test_slow_workers_are_named_with_their_clocks(open_job: OpenJob) -> None:
    first, second, _ = open_job(num_workers=3, wait_limit_s=0.1)
    second.advance(1, 4, at_least=0).result()
    told = "not all workers finished 6 steps within 0.1 s: worker 1 only 4, worker 2 only 0"

    with pytest.raises(WaitTimeoutError, match=re.escape(told)):
        first.advance(0, 8, at_least=6).result()


def test_abort_ends_all_that_wait_and_all_that_come_later_with_its_reason(
    open_job: OpenJob,
) -> None:
    first, second, third = open_job(num_workers=3)
    said = r"worker 1 aborted the job: no space left$"
    waiting = [
        first.barrier("end", 0, step=0),
        third.wait_version(1),
        third.advance(2, 5, at_least=5),
    ]

    second.abort(1, "no space left")
    second.abort(0, "another reason")

    for call in waiting:
        with pytest.raises(CtrPsError, match=said):
            call.result()
    for later in (
        lambda: first.push_grad(random_gradients(0), push_id()).result(),
        lambda: first.push_grad(random_gradients(0), push_id(), at=0).result(),
        lambda: first.barrier("other", 0, step=0).result(),
        lambda: third.wait_version(1).result(),
        lambda: third.take("exchange", 2, received=0).result(),
        lambda: third.renew(2),
    ):
        with pytest.raises(CtrPsError, match=said):
            later()
    assert not any(table.rows for table in first.status().tables.values())


def test_numbers_that_no_worker_reaches_are_refused(open_job: OpenJob) -> None:
    """A worker said to take part in steps to the end of time would be waited for."""
    store, _ = open_job(num_workers=2)

    for call in (
        lambda: store.barrier("end", 0, step=2**64 - 1).result(),
        lambda: store.leave(0, step=2**64 - 1),
        lambda: store.advance(0, 2**64 - 1, at_least=0).result(),
    ):
        with pytest.raises(
            ProtocolError, match=f"worker 0 reports (step|clock) {2**64 - 1}, expected up"
        ):
            call()

    assert store.status().left == frozenset()


def test_abort_by_a_worker_that_is_not_of_the_job_is_refused(store: Store) -> None:
    with pytest.raises(ProtocolError, match="worker 9"):
        store.abort(9, "a reason")

    store.push_grad(random_gradients(0), push_id()).result()


def test_place_of_a_worker_is_taken_by_one_process(open_job: OpenJob) -> None:
    store, other = open_job(num_workers=2)
    store.join(1, INCARNATION, terms={"mode": "sync"}).result()  # sent again

    with pytest.raises(ProtocolError, match="another process joined as worker 1"):
        other.join(1, INCARNATION + 1, terms={"mode": "sync"}).result()
    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        other.join(2, INCARNATION, terms={"mode": "geo"}).result()

    # The job goes on.
    first = store.barrier("end", 0, step=0)
    assert [other.barrier("end", 1, step=0).result(), first.result()] == [0, 0]
