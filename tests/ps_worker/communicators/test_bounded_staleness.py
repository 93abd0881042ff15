"""Bounded staleness: what a step has read, and what it waits for."""

import math
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import TransportError, WaitTimeoutError
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.choice import communicator_of
from ctr_ps.ps_worker.communicators.communicator import Communicator
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import declare, specs_of
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.step_loop import StepLoop
from tests.support.stores import member
from tests.support.training import (
    job,
    random_batches,
    small_model,
    together,
    worker_role,
    worker_run,
)

NUM_PARAMS = small_model().num_params
SGD = (
    "optimizer.sparse={name='sgd', learning_rate=0.5}",
    "optimizer.dense={name='sgd', learning_rate=0.1}",
)
DATA = [random_batches(20, 8, seed=worker) for worker in range(2)]


def bounded(max_staleness: int, *overrides: str) -> Job:
    return job(
        "bounded_staleness",
        f"strategy.bounded_staleness.max_staleness={max_staleness}",
        *SGD,
        *overrides,
    )


def new_store(num_workers: int = 1, wait_limit_s: float = 10.0) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers, wait_limit_s=wait_limit_s)
    declare(store, specs_of(small_model(), bounded(0)))
    return store


def new_communicator(store: Store, settings: Job, worker: int = 0) -> Communicator:
    model = small_model()
    role = worker_role(worker, 2, is_in_process=False)
    return communicator_of(
        settings, store, model, specs_of(model, settings), role, member=member(worker)
    )


def dense_of(store: Store) -> np.ndarray:
    params = np.empty(NUM_PARAMS, np.float32)
    store.pull_dense({"dense": params}).result()
    return params


def run(
    store: Store, settings: Job, worker: int, batches: Sequence[Batch], num_workers: int = 2
) -> None:
    with worker_run(
        store,
        small_model(),
        settings,
        worker=worker,
        num_workers=num_workers,
        is_in_process=False,
    ) as one:
        one.train(batches)
        one.barrier("end")


class PushedTogether:
    """A store to which a step's pushes go when both workers have read what they need for it."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._both = threading.Barrier(2, timeout=10)

    def push_grad(self, gradients, push_id, *, at=None):
        self._both.wait()
        return self._store.push_grad(gradients, push_id, at=at)

    def __getattr__(self, name: str):
        return getattr(self._store, name)


def test_bound_of_zero_learns_what_a_barrier_before_each_step_learns() -> None:
    """Two means are applied, where synchronous training applies the mean of both: it needs twice the rate."""
    bounded_store, sync_store = new_store(num_workers=2), ParameterStore(num_workers=2)
    twice = (
        "optimizer.sparse={name='sgd', learning_rate=1.0}",
        "optimizer.dense={name='sgd', learning_rate=0.2}",
    )
    declare(sync_store, specs_of(small_model(), job("sync", *twice)))
    together_store = PushedTogether(bounded_store)

    together(*(partial(run, together_store, bounded(0), w, DATA[w]) for w in range(2)))
    together(*(partial(run, sync_store, job("sync", *twice), w, DATA[w]) for w in range(2)))

    np.testing.assert_allclose(dense_of(bounded_store), dense_of(sync_store), rtol=1e-3, atol=1e-5)


def test_bound_of_zero_reads_all_that_workers_learnt_in_earlier_steps() -> None:
    """The version read by step c is at least 2c: both workers' first c batches, one version each."""
    store = new_store(num_workers=2)
    versions: dict[int, list[int]] = {0: [], 1: []}

    class Recording:
        def __init__(self, worker: int) -> None:
            self._worker = worker

        def pull_sparse(self, keys, *, missing, at=None):
            answer = store.pull_sparse(keys, missing=missing, at=at)
            versions[self._worker].append(answer.result().version)
            return answer

        def __getattr__(self, name: str):
            return getattr(store, name)

    together(*(partial(run, Recording(w), bounded(0), w, DATA[w]) for w in range(2)))

    for read in versions.values():
        assert [2 * c <= version <= 2 * c + 1 for c, version in enumerate(read)] == [True] * 20
    assert store.status().staleness.largest <= 1


@pytest.mark.parametrize("merges", [(1, 1), (1, 4), (4, 1), (3, 16)])
@pytest.mark.parametrize("thread_num", [1, 2, 3, 5])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 5, 8])
def test_threads_of_a_worker_never_wait_for_themselves(
    max_staleness: int,
    thread_num: int,
    merges: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job says one thread; how many there are is heard when training begins. Half are the first steps."""
    monkeypatch.setattr("ctr_ps.ps_worker.communicators.asynchronous.BATCHES_IN_STEP", 10)
    settings = bounded(
        max_staleness,
        "strategy.bounded_staleness.max_delay_ms=1e6",
        f"strategy.bounded_staleness.max_merge_var_num={merges[0]}",
        f"strategy.bounded_staleness.max_merge_dense_num={merges[1]}",
    )
    store = new_store()

    with worker_run(store, small_model(), settings, is_in_process=False) as one:
        one.train(DATA[0], thread_num=thread_num)

    assert store.status().examples == {0: 8 * 20}


def test_loop_that_is_left_leaves_no_step_begun() -> None:
    store = new_store()
    with worker_run(
        store,
        small_model(),
        bounded(2, "strategy.bounded_staleness.max_delay_ms=1e6"),
        is_in_process=False,
    ) as one:
        for _ in range(5):
            for step in one.steps(DATA[0]):
                if step.step == 2:
                    break
            one.flush()

    assert store.status().examples == {0: 5 * 2 * 8}


def test_meeting_in_the_middle_of_a_loop_keeps_the_bound() -> None:
    store = new_store()
    with worker_run(store, small_model(), bounded(2), is_in_process=False) as one:
        for step in one.steps(DATA[0]):
            if step.step % 5 == 0:
                one.barrier(f"step {step.step}")
        begun, finished = one._communicator._begun, one._communicator._finished

    assert begun == finished


def test_worker_without_data_holds_up_nobody() -> None:
    store = new_store(num_workers=2)

    together(
        partial(run, store, bounded(1), 0, DATA[0]),
        partial(run, store, bounded(1), 1, []),
    )

    assert store.status().examples == {0: 160}


def test_steps_are_counted_afresh_after_a_barrier() -> None:
    """Worker 1 has far fewer batches in the first pass, and would be far behind in the second."""
    store = new_store(num_workers=2)

    def train(worker: int) -> None:
        with worker_run(
            store, small_model(), bounded(1), worker=worker, num_workers=2, is_in_process=False
        ) as one:
            for number, batches in enumerate([DATA[0][: 20 if worker == 0 else 2], DATA[1]]):
                one.train(batches)
                one.barrier(f"pass {number}")

    together(partial(train, 0), partial(train, 1))

    assert store.status().examples == {0: 320, 1: 176}


def test_worker_that_stands_still_is_named() -> None:
    store = new_store(num_workers=2, wait_limit_s=0.2)

    def stand_still() -> None:
        with worker_run(
            store, small_model(), bounded(2), worker=1, num_workers=2, is_in_process=False
        ):
            pass  # closed, but not done

    def train() -> None:
        with pytest.raises(WaitTimeoutError, match=r"workers? .*1"):
            run(store, bounded(2), 0, DATA[0])

    together(stand_still, train)


def test_error_of_a_push_ends_training_that_would_wait_for_it() -> None:
    store = new_store()
    settings = bounded(0)
    communicator = new_communicator(store, settings)

    def push_grad(*_: object, **__: object):
        raise TransportError("server 1 is gone")

    store.push_grad = push_grad
    with pytest.raises(TransportError, match="server 1 is gone"):
        StepLoop(
            small_model(), communicator, batch_size=8, progress=Progress(every_s=math.inf)
        ).train(DATA[0])
    communicator.close()


@pytest.mark.parametrize(
    ("max_staleness", "thread_num", "asks_ahead"),
    [(0, 1, False), (1, 1, False), (2, 1, True), (3, 2, False)],
)
def test_next_batch_is_asked_for_ahead_within_the_bound(
    max_staleness: int, thread_num: int, asks_ahead: bool
) -> None:
    communicator = new_communicator(new_store(), bounded(max_staleness))

    communicator.begin(thread_num)

    assert communicator.is_overlapped is asks_ahead
    communicator.close()


@pytest.mark.parametrize("max_staleness", [0, 8])
def test_worker_in_process_has_no_stale_gradients(max_staleness: int) -> None:
    digests = []
    for settings in (bounded(max_staleness), job("async", *SGD)):
        store = ParameterStore()
        with worker_run(store, small_model(), settings) as one:
            one.train(DATA[0])
            one.barrier("end")
            digests.append(store.digest())
        assert store.status().staleness.largest == 0

    assert digests[0] == digests[1]
