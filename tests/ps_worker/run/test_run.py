"""One worker of a run, alone and with others."""

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import AbortedError, CheckpointError, JobError, ProtocolError, UsageError
from ctr_ps.protos.store import RESTART, Future, ReduceOp, SaveRequest, Shrunk
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.blocks import DataPosition, joined
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.membership import Membership
from ctr_ps.ps_worker.run.run import Run, log_shrunk
from ctr_ps.ps_worker.run.termination import SAVE_S, STEP_S
from tests.support.training import job, random_batches, small_model, together, worker_run

BATCHES = random_batches(6, 8, seed=1)
JOB = job("async")
SYNC = job("sync")


def run_of(
    store: ParameterStore, worker: int, settings: Job = JOB, *, is_in_process: bool = False
) -> Run:
    return worker_run(
        store,
        small_model(),
        settings,
        worker=worker,
        num_workers=store.engine.members.num_workers,
        is_in_process=is_in_process,
    )


def test_what_a_worker_has_learnt_is_in_the_store_after_a_barrier() -> None:
    store = ParameterStore(num_workers=2)

    def run(index: int) -> None:
        with run_of(store, index) as worker:
            for step in worker.steps(itertools.cycle(BATCHES)):
                if step.step == 4:  # left early: nothing was flushed
                    break
            worker.barrier("end")
            assert store.status().examples == {0: 32, 1: 32}

    together(lambda: run(0), lambda: run(1))


@pytest.mark.parametrize("mode", ["sync", "half_async", "async"])
def test_workers_reduce_numbers_in_the_middle_of_training(mode: str) -> None:
    store = ParameterStore(num_workers=2)
    sums = {}

    def run(index: int) -> None:
        with run_of(store, index, job(mode)) as worker:
            worker.train(BATCHES[: 2 + index])
            values = np.array([index + 1.0, 10.0])
            sums[index] = worker.all_reduce(values, ReduceOp.SUM, "sum").tolist()
            worker.train(BATCHES)
            worker.leave()

    together(lambda: run(0), lambda: run(1))

    assert sums == {0: [3.0, 20.0], 1: [3.0, 20.0]}
    assert store.status().left == {0, 1}
    assert store.status().examples == {0: 64, 1: 72}


@pytest.mark.parametrize(
    "settle",
    [lambda run, _: run.settle(), lambda run, url: run.save(SaveRequest(url=url))],
    ids=["settle", "save"],
)
def test_store_has_the_steps_of_a_worker_that_settles_or_saves(
    settle: Callable[[Run, str], object], tmp_path: Path
) -> None:
    """Its last step lacks the part of the other worker, which comes while it waits."""
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    first, other = (run_of(store, worker, SYNC) for worker in range(2))
    together(first.start, other.start)
    wait_version = store.wait_version

    def let_the_other_train(at: int) -> Future[int]:
        next(other.steps(BATCHES))
        return wait_version(at)

    store.wait_version = let_the_other_train
    steps = first.steps(BATCHES)
    next(steps)
    assert store.status().version == 0

    settle(first, str(tmp_path / "model"))

    assert store.status().version == 1


@pytest.mark.usefixtures("past_the_first_steps")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("on_worker_loss", ["wait", "continue"])
def test_worker_that_ends_early_leaves_its_place_and_no_gradient(
    mode: str, on_worker_loss: str
) -> None:
    store = ParameterStore(num_workers=2)
    settings = job(mode, f"cluster.on_worker_loss={on_worker_loss}")

    with run_of(store, 0, settings) as first, run_of(store, 1, settings) as worker:
        together(first.start, worker.start)
        assert not worker.is_needed
        assert first.is_needed == (on_worker_loss == "continue")
        steps = worker.steps(BATCHES)
        next(steps)
        worker.end_early()

        lost = store.engine.job.pass_time(0.25)
        status = store.status()
        first.leave()

    assert lost == ([1] if on_worker_loss == "wait" else [])
    assert status.left == (set() if on_worker_loss == "wait" else {1})
    if mode == "async":
        assert status.examples[1] == BATCHES[0].size


def test_worker_that_the_job_needs_says_so() -> None:
    with run_of(ParameterStore(), 0) as worker:
        assert worker.is_needed
        worker.leave()


def test_needed_worker_that_has_saved_ends_the_job_and_then_by_sigterm_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its lease hears of the end of the job is no error of it."""
    store = ParameterStore()

    def told_to_end() -> None:
        with run_of(store, 0, SYNC) as worker:
            worker.start()
            worker.end_early()
            monkeypatch.setattr(Membership, "refusal", AbortedError("the job has ended"))
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        told_to_end()

    with pytest.raises(AbortedError, match=r"it was told to stop \(SIGTERM\)"):
        store.wait_version(0).result()


@pytest.mark.parametrize(
    ("worker", "rule", "mode", "expected"),
    [
        # (what is called, seconds, whether it ends after its batch)
        (0, "fail", "sync", ("abort_at", SAVE_S, True)),
        (1, "fail", "sync", ("abort_at", SAVE_S, False)),
        (1, "fail", "async", ("abort_at", SAVE_S, False)),
        (0, "continue", "async", ("abort_at", SAVE_S, True)),
        (1, "continue", "async", ("end_after_batch", 0.0, False)),
        (0, "wait", "sync", ("end_after_batch", 0.0, False)),
        (1, "wait", "sync", ("end_after_batch", STEP_S, False)),
        (1, "wait", "async", ("end_after_batch", 0.0, False)),
    ],
)
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_workers_wait_for_worker_0_only_where_it_saves(
    worker: int,
    rule: str,
    mode: str,
    expected: tuple[str, float, bool],
    *,
    saves: bool,
    trains: bool,
) -> None:
    own = ["checkpoint.dir=saved", "checkpoint.every_steps=5"] if saves else []
    settings = job(mode, f"cluster.on_worker_loss={rule}", *own)
    found: list[tuple[str, float, bool]] = []

    def noted(call: str, wait_s: Callable[[], float], *, ends_after_batch: bool = False) -> None:
        found.append((call, wait_s(), ends_after_batch))

    termination: Any = SimpleNamespace(
        abort_at=lambda _, **options: noted("abort_at", **options),
        end_after_batch=lambda _, **options: noted("end_after_batch", **options),
    )
    run: Any = SimpleNamespace(
        _job=settings,
        _communicator=object() if trains else None,
        _membership=SimpleNamespace(give_up=None),
        is_first=worker == 0,
        is_needed=expected[0] == "abort_at",
        store=None,
        worker=worker,
    )

    Run.end_by(run, termination)

    call, wait_s, ends_after_batch = expected
    assert found == [(call, wait_s if saves and trains else 0.0, ends_after_batch and saves)]


def test_process_that_begins_at_a_restart_repeats_it_and_what_came_after() -> None:
    """But none before: then its others train, and it would not."""
    with run_of(ParameterStore(), 0, SYNC) as run:
        membership = run._membership
        membership.joined = replace(membership.joined, restart=6, barriers_passed=7)
        repeated = [run.is_repeating]
        run.start()
        for name in (RESTART, "pass", "next"):
            repeated.append(run.is_repeating)
            run.barrier(name)
        run.leave()

    assert run.restarts
    assert repeated == [True, True, True, False]


def test_workers_start_with_what_the_first_has_loaded(tmp_path) -> None:
    saved = ParameterStore()
    with run_of(saved, 0) as worker:
        worker.train(BATCHES)
        digest = worker.save(SaveRequest(url=str(tmp_path / "model")))
    store = ParameterStore(num_workers=2)
    loads = []

    def load(url: str, *, only=(), token="", load=store.load) -> None:
        loads.append(url)
        load(url)

    store.load = load

    def run(index: int) -> None:
        with run_of(store, index) as worker:
            if worker.is_first:
                worker.load(str(tmp_path / "model"))
            worker.start()
            assert store.digest() == digest

    together(lambda: run(0), lambda: run(1))

    assert loads == [str(tmp_path / "model")]


def test_checkpoint_is_loaded_as_it_was_read(tmp_path) -> None:
    url = str(tmp_path / "model")
    with run_of(ParameterStore(), 0) as worker:
        worker.save(SaveRequest(url=url))
        token = Checkpoint.open(url).token
        worker.save(SaveRequest(url=url))

    with pytest.raises(CheckpointError, match="was replaced during the load"):
        run_of(ParameterStore(), 0).load(url, token=token)


def fail_in(run: Run, *events: Callable[[], None]) -> None:
    with run:
        for event in events:
            event()
        raise OSError("the disk is gone")


def test_error_of_a_worker_releases_those_that_wait_for_it() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=60.0)
    failing, waiting = run_of(store, 1), run_of(store, 0)

    def fail() -> None:
        with pytest.raises(OSError, match="disk"):
            fail_in(failing)

    def wait() -> None:
        with waiting, pytest.raises(AbortedError, match="worker 1 aborted the job: OSError: the d"):
            waiting.barrier("end")

    together(fail, wait)


def test_error_after_leaving_is_of_no_concern_to_others() -> None:
    store = ParameterStore(num_workers=2)
    failing, other = run_of(store, 0), run_of(store, 1)
    together(failing.start, other.start)

    with other, pytest.raises(OSError, match="disk"):
        fail_in(failing, failing.leave)

    assert store.wait_version(0).result() == 0


def test_model_is_loaded_before_training_only(tmp_path) -> None:
    url = str(tmp_path / "model")
    with run_of(ParameterStore(), 0) as worker:
        worker.save(SaveRequest(url=url))
        worker.load(url)
        worker.start()

        with pytest.raises(UsageError, match="cannot be loaded, as training has begun"):
            worker.load(url)


def test_evaluation_sees_what_was_trained() -> None:
    with run_of(ParameterStore(), 0, job("sync")) as worker:
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
        with run_of(ParameterStore(), 0, settings) as worker:
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

    with run_of(ParameterStore(), 0, job("async")) as worker:
        worker.train(Named())
        assert names == {threading.main_thread()}
        worker.train(Named(), thread_num=2)

    assert len(names) > 1


@pytest.mark.parametrize("thread_num", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "half_async", "async", "geo", "bounded_staleness"])
def test_store_knows_where_in_the_data_training_is(mode: str, thread_num: int) -> None:
    places = [DataPosition(skip=skip) for skip in range(len(BATCHES))]
    store = ParameterStore()

    with run_of(store, 0, job(mode)) as worker:
        worker.train(zip(BATCHES, places, strict=True), thread_num=thread_num)
        there = store.status().progress[0]
        worker.train(BATCHES[:2], thread_num=thread_num)
        beyond = store.status().progress[0]

    assert (there.step, there.position) == (6, places[-1].to_json())
    assert (beyond.step, beyond.position) == (8, "")


@pytest.mark.usefixtures("past_the_first_steps")
def test_flush_brings_all_that_was_learnt_to_the_store() -> None:
    patient = job(
        "async", "strategy.async.max_merge_var_num=100", "strategy.async.max_delay_ms=100000"
    )
    with run_of(ParameterStore(), 0, patient) as worker:
        next(worker.steps(BATCHES))
        assert worker.store.status().examples == {}

        worker.flush()

        assert worker.store.status().examples == {0: 8}


def test_workers_that_do_not_agree_do_not_start() -> None:
    store = ParameterStore(num_workers=2)
    first = run_of(store, 0, job("async"))

    told = r'strategy\.mode = "geo" \(worker 0 has strategy\.mode = "async"\)'
    with pytest.raises(JobError, match=f"worker 1 has other settings .*{told}"):
        run_of(store, 1, job("geo"))
    with first, pytest.raises(AbortedError, match=told):
        first.start()


def test_workers_agree_on_how_many_they_are() -> None:
    store = ParameterStore(num_workers=2)

    with pytest.raises(
        JobError,
        match=r"worker 2 has .* PADDLE_TRAINERS_NUM = 3 \(the server has PADDLE_TRAINERS_NUM = 2\)",
    ):
        worker_run(store, small_model(), JOB, worker=2, num_workers=3)


@pytest.mark.parametrize("has_trained", [False, True])
def test_barriers_and_sums_work_before_and_after_training(has_trained: bool) -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    sums, barriers = {}, []

    def barrier(name: str, worker: int, *, step: int, barrier=store.barrier):
        barriers.append((name, worker))
        return barrier(name, worker, step=step)

    store.barrier = barrier

    def work(index: int) -> None:
        run = run_of(store, index, SYNC, is_in_process=True)
        if has_trained:
            run.train(BATCHES[:4])
        run.barrier()
        total = run.all_reduce(np.array([index, 1.0]), ReduceOp.SUM)
        sums[index] = total.tolist()
        total += 1  # a worker's own copy
        assert run.all_reduce(np.array([float(index)]), ReduceOp.MAX) == 1.0
        run.train(BATCHES[:4])
        run.leave()

    together(lambda: work(0), lambda: work(1))

    assert {("barrier-1", 0), ("barrier-1", 1)} <= set(barriers)
    assert sums == {0: [1.0, 2.0], 1: [1.0, 2.0]}
    assert store.status().left == {0, 1}
    assert store.status().examples == {0: 32 * (1 + has_trained), 1: 32 * (1 + has_trained)}


def test_sum_without_those_who_left_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    run_of(store, 1, SYNC).leave()

    assert run_of(store, 0, SYNC).all_reduce(np.array([3.0]), ReduceOp.SUM).tolist() == [3.0]

    assert "only 1 worker contributed, 1 of 2 have left" in caplog.text


def test_sum_that_is_repeated_says_nothing_of_those_who_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost process has said it, and may be answered with its own numbers alone."""
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    run_of(store, 1, SYNC).leave()
    monkeypatch.setattr(Run, "is_repeating", True)

    run_of(store, 0, SYNC).all_reduce(np.array([3.0]), ReduceOp.SUM, remember=False)

    assert caplog.text == ""


def test_sum_of_all_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)
    values = np.array([3.0])

    together(
        *(lambda i=i: run_of(store, i, SYNC).all_reduce(values, ReduceOp.SUM) for i in range(2))
    )

    assert caplog.text == ""


def test_metrics_on_one_worker_alone_are_an_error_where_the_other_waits() -> None:
    store = ParameterStore(num_workers=2, wait_limit_s=10.0)

    def reduce() -> None:
        with pytest.raises(ProtocolError):
            run_of(store, 0, SYNC).all_reduce(np.array([3.0]), ReduceOp.SUM)

    def barrier() -> None:
        with pytest.raises(ProtocolError):
            run_of(store, 1, SYNC).barrier()

    together(reduce, barrier)


@pytest.mark.parametrize("is_log_loss", [True, False], ids=["log-loss", "another"])
def test_only_a_log_loss_is_compared_with_the_base_rates(is_log_loss: bool, caplog) -> None:
    model = small_model()
    batches = random_batches(2, 20, seed=1)
    loss = model._loss

    def twice(*arrays: np.ndarray) -> float:
        return 2 * loss.with_gradient(*arrays)

    if not is_log_loss:
        model._loss = replace(loss, with_gradient=twice)

    with worker_run(ParameterStore(), model, job("sync", "train.log_every_s=1e-9")) as run:
        run.train(batches)
        labels = np.float32([0, 1])
        run.progress.add(labels, np.float32([0.9, 0.1]), 100.0)

    warned = [record for record in caplog.records if "click rate" in record.getMessage()]
    assert len(warned) == is_log_loss


def logged(caplog: pytest.LogCaptureFixture, shrunk: Shrunk) -> tuple[int, str]:
    with caplog.at_level(logging.INFO):
        log_shrunk({"embedding": shrunk})
    (record,) = caplog.records
    return record.levelno, record.getMessage()


def test_what_went_and_what_is_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shrunk = Shrunk(rows=7, size_bytes=734_003, left_rows=7, candidates=9)

    assert logged(caplog, shrunk) == (
        logging.INFO,
        "shrunk table=embedding removed_rows=7 left_rows=7 removed_mb=0.7 removed_candidates=9",
    )


def test_that_most_rows_went_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, Shrunk(rows=8, left_rows=7)) == (
        logging.WARNING,
        "shrunk table=embedding removed_rows=8 left_rows=7 removed_mb=0.0",
    )


def test_table_without_rows_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, Shrunk())[0] == logging.INFO
