"""Two workers of a run in one process: where they meet, and what of those that do not come."""

import numpy as np
import pytest

from protos.errors import ProtocolError
from protos.role import WorkerRole
from protos.store import ReduceOp
from ps_server.store import ParameterStore
from ps_worker.fleet import worker_run
from ps_worker.fleet.worker_run import Task, WorkerRun
from tests.support.training import job, random_batches, small_model, together

BATCHES = random_batches(4, 8, seed=1)
TASK = Task(model=small_model(), job=job("sync"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ParameterStore:
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    monkeypatch.setattr(worker_run, "_store_of", lambda role, job: store)
    return store


def run_of(index: int) -> WorkerRun:
    return WorkerRun(WorkerRole(endpoints=(), worker_index=index, num_workers=2), TASK)


def train(run: WorkerRun) -> None:
    run.train(BATCHES, fetch_period_s=1.0)


@pytest.mark.parametrize("has_trained", [False, True])
def test_workers_meet_before_and_after_training(has_trained: bool, store: ParameterStore) -> None:
    sums, meetings = {}, []

    def barrier(name: str, worker: int, *, step: int, barrier=store.barrier):
        meetings.append((name, worker))
        return barrier(name, worker, step=step)

    store.barrier = barrier

    def work(index: int) -> None:
        run = run_of(index)
        if has_trained:
            train(run)
        run.barrier()
        total = run.all_reduce(np.array([index, 1.0]), ReduceOp.SUM)
        sums[index] = total.tolist()
        total += 1  # a worker's own copy
        assert run.all_reduce(np.array([float(index)]), ReduceOp.MAX) == 1.0
        train(run)
        run.leave()

    together(lambda: work(0), lambda: work(1))

    assert {("meeting-1", 0), ("meeting-1", 1)} <= set(meetings)
    assert sums == {0: [1.0, 2.0], 1: [1.0, 2.0]}
    assert store.status().left == {0, 1}
    assert store.status().examples == {0: 32 * (1 + has_trained), 1: 32 * (1 + has_trained)}


def test_sum_without_those_who_left_says_so(
    store: ParameterStore, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(1).leave()

    assert run_of(0).all_reduce(np.array([3.0]), ReduceOp.SUM).tolist() == [3.0]

    assert "numbers of 1 workers only: the other 1 have left" in caplog.text


def test_sum_of_all_says_nothing(store: ParameterStore, caplog: pytest.LogCaptureFixture) -> None:
    values = np.array([3.0])

    together(*(lambda i=i: run_of(i).all_reduce(values, ReduceOp.SUM) for i in range(2)))

    assert caplog.text == ""


def test_metrics_on_one_worker_alone_are_an_error_where_the_other_meets(
    store: ParameterStore,
) -> None:
    def reduce() -> None:
        with pytest.raises(ProtocolError):
            run_of(0).all_reduce(np.array([3.0]), ReduceOp.SUM)

    def barrier() -> None:
        with pytest.raises(ProtocolError):
            run_of(1).barrier()

    together(reduce, barrier)
