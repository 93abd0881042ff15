"""Asynchronous training: everything pushed is applied and read back, whatever is merged."""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.store import Future, Missing, PushId, Version
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators import asynchronous
from ctr_ps.ps_worker.communicators.asynchronous import AsyncCommunicator
from ctr_ps.ps_worker.communicators.choice import communicator_of
from ctr_ps.ps_worker.communicators.communicator import StepPush
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, declare, specs_of
from tests.support.cluster import cluster
from tests.support.stores import joined, member
from tests.support.training import job, random_batches, small_model, together, train_worker

LIMIT_S = 20.0
IN_VAIN = "training before worker 0 has trained the first batches"
ROWS_OF_THREE = {"embedding": np.arange(3, dtype=np.uint64)}
LEARNS = (
    "optimizer.sparse={name='adagrad', learning_rate=0.1, initial_accumulator=0.0}",
    "optimizer.dense=adam",
)


@pytest.mark.parametrize("merges", [(1, 1), (3, 5)])
def test_cluster_learns_and_counts_every_example(
    merges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "BATCHES_IN_STEP", 100)
    settings = job(
        "async",
        f"strategy.async.max_merge_var_num={merges[0]}",
        f"strategy.async.max_merge_dense_num={merges[1]}",
        *LEARNS,
    )
    data = [random_batches(150, 32, seed=1), random_batches(100, 32, seed=2)]

    with cluster(num_servers=2, num_workers=2) as servers:
        clients = [servers.client(joins=False), servers.client(joins=False)]
        progresses = {}

        def work(worker: int) -> None:
            progresses[worker] = train_worker(
                clients[worker],
                data[worker],
                settings,
                worker=worker,
                num_workers=2,
                is_in_process=False,
            )

        together(*(functools.partial(work, worker) for worker in range(2)))
        examples = clients[0].status().examples

    assert examples == {0: 150 * 32, 1: 100 * 32}
    assert progresses[0].mean_loss < 0.6  # a coin has 0.693


@pytest.mark.parametrize("ends_early", [False, True], ids=["batches", "barrier"])
def test_others_begin_when_worker_0_has_trained_the_first_batches(
    ends_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or when it has come to a barrier, as it has no more."""
    monkeypatch.setattr(asynchronous, "FIRST_BATCHES", 5)
    settings = job("async", *LEARNS)
    num_first = 3 if ends_early else 5
    data = [random_batches(3 if ends_early else 20, 32, seed=1), random_batches(20, 32, seed=2)]
    pushed: list[PushId] = []
    store = ParameterStore(num_workers=2)
    push_grad = store.push_grad

    # Worker 1 comes to its first batch before worker 0 reads one, and trains it before worker 0's last.
    waits, begins = threading.Event(), threading.Event()

    def recorded(gradients: Gradients, push_id: PushId, **named: Any) -> Future[Version]:
        pushed.append(push_id)
        if push_id.worker == 1:
            begins.set()
        return push_grad(gradients, push_id, **named)

    monkeypatch.setattr(store, "push_grad", recorded)
    advance = store.advance

    def told(worker: int, clock: int, *, at_least: int) -> Future[int]:
        if worker == 1 and at_least:
            waits.set()
        return advance(worker, clock, at_least=at_least)

    monkeypatch.setattr(store, "advance", told)

    def late(batches: Sequence[Batch]) -> Iterator[Batch]:
        assert waits.wait(LIMIT_S)
        yield from batches[:10]
        assert ends_early or begins.wait(LIMIT_S)
        yield from batches[10:]

    together(
        *(
            functools.partial(
                train_worker,
                store,
                data[worker] if worker else late(data[0]),
                settings,
                worker=worker,
                num_workers=2,
                is_in_process=False,
            )
            for worker in range(2)
        )
    )

    workers = [push.worker for push in pushed]
    assert workers[:num_first] == [0] * num_first
    assert sorted(workers) == [0] * len(data[0]) + [1] * 20
    first_of_worker_1 = pushed[workers.index(1)]
    assert first_of_worker_1.pulled >= num_first  # what it learns from has them


def test_worker_0_lets_others_begin_when_rows_have_the_first_batches_and_no_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = declared(num_workers=2)
    told: list[int] = []
    advance = store.advance

    def recorded(worker: int, clock: int, *, at_least: int) -> Future[int]:
        told.append(worker)
        return advance(worker, clock, at_least=at_least)

    monkeypatch.setattr(store, "advance", recorded)
    communicator = communicator_on(store, clocks=store)
    found = []
    try:
        communicator.rejoin(0)
        for pulled in (0, asynchronous.FIRST_BATCHES - 1, asynchronous.FIRST_BATCHES):
            communicator.push(StepPush(gradient(), 10, pulled=pulled))
            communicator.pull(ROWS_OF_THREE).result()
            found.append(list(told))
    finally:
        communicator.close()

    assert found == [[], [], [0]]


def test_nobody_waits_for_the_first_batches_of_a_model_that_had_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a process that takes a lost one's place, while worker 0 trains on."""
    store = declared(num_workers=2, wait_limit_s=0.0)
    with closing(communicator_on(store, worker=1, clocks=store)) as communicator:
        communicator.rejoin(asynchronous.FIRST_BATCHES)

        rows = communicator.pull(ROWS_OF_THREE).result().rows

    assert rows["embedding"].shape == (3, 4)
    assert not caplog.messages  # that it waited in vain


def test_after_a_barrier_others_wait_again_for_the_first_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a pass with fewer batches: that worker 0 was done with it let the others begin."""
    store = declared(num_workers=2, wait_limit_s=0.5)
    with closing(communicator_on(store, worker=1, clocks=store)) as communicator:
        communicator.rejoin(0)
        of_worker_0 = store.barrier("pass", 0, step=0)
        communicator.pull(ROWS_OF_THREE).result()
        assert not caplog.messages
        store.barrier("pass", 1, step=0).result()
        of_worker_0.result()

        communicator.rejoin(asynchronous.FIRST_BATCHES - 1)
        communicator.pull(ROWS_OF_THREE).result()

    assert [text.partition(":")[0] for text in caplog.messages] == [IN_VAIN]


@pytest.mark.parametrize("is_idle", [False, True])
def test_worker_0_alone_is_waited_for_and_no_longer_than_servers_let_it(
    is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = declared(num_workers=3, wait_limit_s=0.5)
    worker_1, worker_2 = (communicator_on(store, worker=each, clocks=store) for each in (1, 2))
    try:
        for each in (worker_1, worker_2):
            each.rejoin(0)
        if not is_idle:
            store.advance(0, 1, at_least=0).result()

        pulled = [worker_1.pull(ROWS_OF_THREE).result() for _ in range(2)]
    finally:
        worker_1.close()
        worker_2.close()

    assert [each.rows["embedding"].shape for each in pulled] == [(3, 4)] * 2
    warnings = [IN_VAIN] * is_idle  # once: it waits at its first batch alone
    assert [text.partition(":")[0] for text in caplog.messages] == warnings


@pytest.mark.parametrize("num_heter", [0, 1])
def test_nobody_waits_for_worker_0_in_a_job_with_heter_trainers(
    num_heter: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Their clocks stand still."""
    settings = job("async", *LEARNS)
    model, store = small_model(), ParameterStore(num_workers=2, wait_limit_s=0.0)
    joined(store)
    specs = specs_of(model, settings)
    declare(store, specs)
    heter = tuple(f"heter-{index}:1" for index in range(num_heter))
    role = WorkerRole(endpoints=("ps-0:1",), worker_index=1, num_workers=2, heter_endpoints=heter)
    with closing(
        communicator_of(settings, store, model, specs, role, member=member(1))
    ) as communicator:
        communicator.rejoin(0)
        communicator.pull(ROWS_OF_THREE).result()

    warnings = [] if num_heter else [IN_VAIN]
    assert [text.partition(":")[0] for text in caplog.messages] == warnings


def test_flushed_parameters_are_read_back() -> None:
    model, store = small_model(), ParameterStore()
    settings = job(
        "async",
        "optimizer.sparse={name='sgd', learning_rate=0.1}",
        "optimizer.dense={name='sgd', learning_rate=0.1}",
    )
    declare(store, specs_of(model, settings))
    with closing(communicator_on(store)) as communicator:
        with communicator.params() as params:
            before = params.copy()
        communicator.push(StepPush(gradient(), 10, pulled=0))
        communicator.flush()
        with communicator.params() as params:
            after = params.copy()

    np.testing.assert_allclose(after, before - 0.1 * 1.0 / 10, rtol=1e-5)


@pytest.mark.usefixtures("past_the_first_steps")
@pytest.mark.parametrize("merges", [(1000, 1000), (1, 1000), (1000, 1)])
def test_gradient_leaves_after_the_longest_delay_without_a_full_merge(
    merges: tuple[int, int],
) -> None:
    """The sender wakes by itself: nothing but time makes this push leave."""
    store = declared()
    applied = Applied(store)
    with closing(communicator_on(applied, merges=merges, max_delay_ms=20)) as communicator:
        communicator.push(StepPush(gradient(), 10, pulled=0))

        assert applied.all_of({"embedding", DENSE_BLOCK})


def test_error_of_the_sender_reaches_the_training_thread() -> None:
    store = declared()
    with closing(communicator_on(store)) as communicator:
        communicator.push(StepPush(gradient(extra=1), 10, pulled=0))  # longer than the block
        with pytest.raises(CtrPsError, match="dense"):
            communicator.flush()


def test_push_waits_while_the_queue_is_full_and_goes_on() -> None:
    store = declared()
    busy = Busy(store)
    communicator = communicator_on(busy, send_queue_size=2)
    went_on = threading.Event()

    def push(number: int) -> None:
        for _ in range(number):
            communicator.push(StepPush(gradient(), 10, pulled=0))

    def push_one_more() -> None:
        push(1)
        went_on.set()

    pusher = threading.Thread(target=push_one_more)
    try:
        push(1)
        assert busy.entered.wait(LIMIT_S)  # out of the queue, and on its way
        push(2)
        pusher.start()
        assert not went_on.wait(0.1)
        busy.released.set()
        assert went_on.wait(LIMIT_S)
        communicator.flush()
    finally:
        busy.released.set()
        communicator.close()
        pusher.join(LIMIT_S)

    assert store.status().examples == {0: 40}


@pytest.mark.parametrize("in_step", [5, 1000])
@pytest.mark.parametrize("merges", [(1, 1), (1, 4), (3, 5)])
def test_trainer_reads_old_rows_only_after_the_first_batches(
    in_step: int, merges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later it asks for the rows of a batch before it pushes the batch before: stale by one or more."""
    monkeypatch.setattr(asynchronous, "BATCHES_IN_STEP", in_step)
    store = ParameterStore()
    settings = job(
        "async",
        "train.thread_num=1",
        f"strategy.async.max_merge_var_num={merges[0]}",
        f"strategy.async.max_merge_dense_num={merges[1]}",
        *LEARNS,
    )

    train_worker(store, random_batches(50, 8, seed=1), settings, is_in_process=False)

    status = store.status()
    assert status.version == status.staleness.batches == 50
    assert (status.staleness.largest == 0) is (in_step == 1000)


def test_rows_that_were_asked_for_ahead_are_read_after_the_push_of_a_young_model() -> None:
    store = declared()
    with closing(communicator_on(store)) as communicator:
        young = communicator.pull(ROWS_OF_THREE)
        communicator.push(StepPush(gradient(), 10, pulled=0))
        version_of_young = young.result().version
        communicator.push(StepPush(gradient(), 10, pulled=asynchronous.BATCHES_IN_STEP))
        communicator.flush()
        old = communicator.pull(ROWS_OF_THREE)
        communicator.push(StepPush(gradient(), 10, pulled=2))
        communicator.flush()
        version_of_old = old.result().version

    assert (version_of_young, version_of_old) == (1, 2)


def test_batches_of_a_young_model_are_not_merged() -> None:
    store = declared()
    applied = Applied(store)
    with closing(communicator_on(applied, merges=(2, 4), max_delay_ms=1e6)) as communicator:
        for _ in range(3):
            communicator.push(StepPush(gradient(), 10, pulled=0))
        communicator.flush()
        pushed_young = sorted(applied.pushed)
        applied.pushed.clear()
        for _ in range(4):
            communicator.push(StepPush(gradient(), 10, pulled=asynchronous.BATCHES_IN_STEP))
        communicator.flush()

    assert pushed_young == [(DENSE_BLOCK, 10)] * 3 + [("embedding", 10)] * 3
    assert sorted(applied.pushed) == [(DENSE_BLOCK, 40)] + [("embedding", 20)] * 2


def test_in_process_threads_count_every_example() -> None:
    store = ParameterStore()
    settings = job("async", "train.thread_num=4", *LEARNS)

    progress = train_worker(store, random_batches(200, 8, seed=1), settings)

    assert store.status().examples == {0: 1600}
    assert progress.examples == 1600


def test_pull_of_training_reads_initial_values() -> None:
    store = declared()
    keys = {"embedding": np.arange(5, dtype=np.uint64)}
    with closing(communicator_on(store)) as communicator:
        rows = communicator.pull(keys).result().rows["embedding"]

    expected = store.pull_sparse(keys, missing=Missing.INITIAL).result().rows["embedding"]
    assert rows.tobytes() == expected.tobytes()
    assert rows.any()


class Applied:
    """A store that says when something was pushed to all of some tables and blocks."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self.pushed: list[tuple[str, float]] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def push_grad(self, gradients: Gradients, *arguments, **named):
        answer = self._store.push_grad(gradients, *arguments, **named)
        with self._changed:
            self.pushed += [(name, grad.examples) for name, grad in gradients.sparse.items()]
            self.pushed += [(name, grad.examples) for name, grad in gradients.dense.items()]
            self._changed.notify_all()
        return answer

    def all_of(self, names: set[str]) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: names <= {name for name, _ in self.pushed}, LIMIT_S
            )


class Busy:
    """A store that takes no push before it is released."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self.entered = threading.Event()
        self.released = threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def push_grad(self, *arguments, **named):
        self.entered.set()
        assert self.released.wait(LIMIT_S), "nobody released the store"
        return self._store.push_grad(*arguments, **named)


def communicator_on(
    store,
    *,
    worker: int = 0,
    clocks: ParameterStore | None = None,
    merges: tuple[int, int] = (1, 1),
    max_delay_ms: float = 100,
    send_queue_size: int = 16,
):
    return AsyncCommunicator(
        store,
        member=member(worker),
        num_params=small_model().num_params,
        clocks=clocks,
        max_merge_var_num=merges[0],
        max_merge_dense_num=merges[1],
        send_queue_size=send_queue_size,
        max_delay_ms=max_delay_ms,
        stall_limit_s=30,
    )


def gradient(*, extra: int = 0) -> Gradients:
    rows = SparseGrad(ROWS_OF_THREE["embedding"], np.ones((3, 4), np.float32), 10)
    block = DenseGrad(np.ones(small_model().num_params + extra, np.float32), 10)
    return Gradients(sparse={"embedding": rows}, dense={DENSE_BLOCK: block})


def declared(num_workers: int = 1, **settings: float) -> ParameterStore:
    """Returns a store with the small model, and its workers if there are several."""
    store = ParameterStore(num_workers=num_workers, **settings)
    if num_workers > 1:
        joined(store)
    declare(store, specs_of(small_model(), job("async", *LEARNS)))
    return store
