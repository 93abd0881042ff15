"""One worker of a run: what it does alone, and where it meets the others."""

import itertools
import threading

import numpy as np
import pytest

from protos.errors import CheckpointError, JobError
from protos.store import ReduceOp
from ps_server.checkpoint.reader import Checkpoint
from ps_server.store import ParameterStore
from ps_worker.checkpoints.resume import EarlierRun
from ps_worker.checkpoints.run_state import RunState
from ps_worker.data.blocks.position import DataPosition
from ps_worker.job import Job
from ps_worker.training.worker import Worker
from tests.support.training import job, joined, random_batches, small_model, together

BATCHES = random_batches(6, 8, seed=1)
JOB = job("async")


def worker_of(store: ParameterStore, index: int, settings: Job = JOB, load: str = "") -> Worker:
    return Worker(
        store,
        small_model(),
        settings,
        index=index,
        num_workers=store.num_workers,
        is_in_process=False,
        load=load,
    )


def test_what_a_worker_has_learnt_is_in_the_store_after_meeting() -> None:
    store = ParameterStore(num_workers=2)

    def run(index: int) -> None:
        with worker_of(store, index) as worker:
            for step in worker.steps(itertools.cycle(BATCHES)):
                if step.step == 4:  # left early: nothing was flushed
                    break
            worker.barrier("met")
            assert store.status().examples == {0: 32, 1: 32}

    together(lambda: run(0), lambda: run(1))


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
def test_workers_reduce_numbers_in_the_middle_of_training(mode: str) -> None:
    store = ParameterStore(num_workers=2)
    sums = {}

    def run(index: int) -> None:
        with worker_of(store, index, job(mode)) as worker:
            worker.train(BATCHES[: 2 + index])
            values = np.array([index + 1.0, 10.0])
            sums[index] = worker.all_reduce("sum", values, ReduceOp.SUM).tolist()
            worker.train(BATCHES)
            worker.leave()

    together(lambda: run(0), lambda: run(1))

    assert sums == {0: [3.0, 20.0], 1: [3.0, 20.0]}
    assert store.status().left == {0, 1}
    assert store.status().examples == {0: 64, 1: 72}


def test_only_the_first_worker_loads(tmp_path) -> None:
    saved = ParameterStore()
    with worker_of(saved, 0) as worker:
        worker.train(BATCHES)
        digest = worker.save(str(tmp_path / "model"), {})
    store = ParameterStore(num_workers=2)
    loads = []

    def load(url: str, *, only=(), load=store.load) -> None:
        loads.append(url)
        load(url)

    store.load = load

    def run(index: int) -> None:
        with worker_of(store, index, load=str(tmp_path / "model")):
            assert store.digest() == digest

    together(lambda: run(0), lambda: run(1))

    assert loads == [str(tmp_path / "model")]


def test_checkpoint_that_is_none_ends_the_start(tmp_path) -> None:
    with pytest.raises(CheckpointError):
        worker_of(ParameterStore(), 0, load=str(tmp_path))


def test_run_goes_on_from_the_checkpoint_that_was_read_alone(tmp_path) -> None:
    url = str(tmp_path / "model")
    with worker_of(ParameterStore(), 0) as worker:
        worker.save(url, {})
        state = RunState(epochs_done=0, is_between_epochs=True, num_workers=1, files="", order={})
        token = Checkpoint.open(url).token
        run = EarlierRun(url=url, token=token, version=0, progress={}, state=state)
        worker.save(url, {})

    with pytest.raises(CheckpointError, match="replaced in the meantime"):
        Worker(ParameterStore(), small_model(), JOB, earlier_run=run)


def test_evaluation_sees_what_was_trained() -> None:
    with worker_of(ParameterStore(), 0, job("sync")) as worker:
        before = worker.evaluate(BATCHES).log_loss()
        for _ in range(20):
            worker.train(BATCHES)
        after = worker.evaluate(BATCHES).log_loss()

    assert after < before - 0.05


@pytest.mark.parametrize("thread_num", [1, 2])
def test_batches_may_be_larger_than_the_job_says(thread_num: int) -> None:
    large, unlike = joined(BATCHES), job("async", "train.batch_size=1")
    as_told = job("async", f"train.batch_size={large.size}")
    log_losses = []

    for settings in (unlike, as_told):
        with worker_of(ParameterStore(), 0, settings) as worker:
            worker.train([BATCHES[0], large], thread_num=thread_num)
            worker.train([large])
            assert worker.store.status().examples == {0: 8 + 2 * large.size}
            log_losses.append(worker.evaluate([BATCHES[0], large]).log_loss())

    assert log_losses[0] == pytest.approx(log_losses[1], rel=0.1)


def test_a_pass_may_have_more_threads_than_the_job() -> None:
    names = set()

    class Named:
        def __iter__(self):
            for batch in BATCHES:
                names.add(threading.current_thread())
                yield batch

    with worker_of(ParameterStore(), 0, job("async")) as worker:
        worker.train(Named())
        assert names == {threading.main_thread()}
        worker.train(Named(), thread_num=2)

    assert len(names) > 1


@pytest.mark.parametrize("thread_num", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo", "bounded_staleness"])
def test_store_knows_where_in_the_data_training_is(mode: str, thread_num: int) -> None:
    places = [DataPosition(skip=skip) for skip in range(len(BATCHES))]
    store = ParameterStore()

    with worker_of(store, 0, job(mode)) as worker:
        worker.train(zip(BATCHES, places, strict=True), thread_num=thread_num)
        there = store.status().progress[0]
        worker.train(BATCHES[:2], thread_num=thread_num)
        beyond = store.status().progress[0]

    assert (there.step, there.position) == (6, places[-1].to_json())
    assert (beyond.step, beyond.position) == (8, "")


def test_flush_brings_all_that_was_learnt_to_the_store() -> None:
    patient = job("async", "strategy.max_merge_var_num=100", "strategy.max_delay_ms=100000")
    with worker_of(ParameterStore(), 0, patient) as worker:
        next(worker.steps(BATCHES))
        assert worker.store.status().examples == {}

        worker.flush()

        assert worker.store.status().examples == {0: 8}


def test_workers_that_do_not_agree_do_not_start() -> None:
    store = ParameterStore(num_workers=2)

    def run(index: int) -> None:
        with pytest.raises(JobError, match=f"worker {index} does not run the same job"):
            Worker(
                store,
                small_model(),
                JOB,
                index=index,
                num_workers=2,
                agreement=f"epochs {index}",
            )

    together(lambda: run(0), lambda: run(1))
