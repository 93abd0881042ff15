"""One suite for every store: barriers that carry numbers."""

import numpy as np
import pytest

from protos.errors import ProtocolError, WaitTimeoutError
from protos.store import ReduceOp
from tests.support.stores import pull, push_id, random_gradients


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


@pytest.mark.parametrize("fault", ["length", "op", "nothing"])
def test_numbers_that_do_not_fit_are_an_error_for_all_and_free_the_name(open_job, fault):
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
            ProtocolError, match=r"'totals' .* worker 1 2 numbers for SUM, worker 2"
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


def test_numbers_that_some_do_not_bring_name_them(open_job):
    first, *_ = open_job(num_workers=3, wait_limit_s=0.1)

    with pytest.raises(WaitTimeoutError, match=r"barrier 'totals': workers \[1, 2\] did not come"):
        first.all_reduce("totals", 0, np.ones(1), ReduceOp.SUM, step=0).result()
