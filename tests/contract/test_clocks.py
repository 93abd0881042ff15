"""One suite for every store: workers that keep within a bound of the slowest."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos.errors import ProtocolError, WaitTimeoutError
from protos.store import Store
from tests.support.stores import OpenJob

LIMIT_S = 20.0


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


def test_old_message_does_not_turn_a_clock_back(open_job: OpenJob) -> None:
    (store,) = open_job()
    store.advance(0, 5, at_least=0).result()

    assert store.advance(0, 2, at_least=0).result() == 5


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


def test_worker_that_left_is_refused(open_job: OpenJob) -> None:
    first, _ = open_job(num_workers=2)
    first.leave(0, step=0)

    with pytest.raises(ProtocolError, match="worker 0 has finished 3 steps, but has left"):
        first.advance(0, 3, at_least=0).result()


def test_slow_workers_are_named_with_their_clocks(open_job: OpenJob) -> None:
    first, second, _ = open_job(num_workers=3, wait_limit_s=0.1)
    second.advance(1, 4, at_least=0).result()
    told = "not all workers finished 6 steps within 0.1 s: worker 1 only 4, worker 2 only 0"

    with pytest.raises(WaitTimeoutError, match=re.escape(told)):
        first.advance(0, 8, at_least=6).result()


def run(store: Store, worker: int, num_steps: int, bound: int, most_ahead: dict[int, int]) -> None:
    slowest = 0
    for step in range(num_steps):
        if slowest < step - bound:
            slowest = store.advance(worker, step, at_least=step - bound).result()
        most_ahead[worker] = max(most_ahead[worker], step - slowest)
    store.barrier("end", worker, step=0).result()


@pytest.mark.parametrize("bound", [0, 3])
def test_workers_of_unequal_length_keep_within_the_bound_to_the_end(
    open_job: OpenJob, bound: int
) -> None:
    lengths = [30, 5, 50]
    stores = open_job(num_workers=3)
    most_ahead = dict.fromkeys(range(3), 0)

    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(run, store, worker, num_steps, bound, most_ahead)
            for worker, (store, num_steps) in enumerate(zip(stores, lengths, strict=True))
        ]
        for each in runs:
            each.result(LIMIT_S)

    assert max(most_ahead.values()) <= bound
