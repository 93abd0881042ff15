"""Steps are applied outside the coordinator's lock: what waits for one, and what does not."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.chunking import split_push
from ctr_ps.protos.errors import (
    AbortedError,
    CtrPsError,
    NoMemoryError,
    ProtocolError,
    WaitTimeoutError,
)
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import Missing, SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import KEYS, TOWER, WIDE, in_process, push_id, random_gradients, train

LIMIT_S = 10.0
SOON_S = 0.02  # for what must not happen: too short a wait hides a fault, but never makes one


class HeldStep:
    """A store of two workers in which the application of a step waits until it is told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> None:
        self.store = in_process(num_workers=2, wait_limit_s=LIMIT_S)
        self.has_begun = threading.Event()
        self._may_end = threading.Event()
        self._error: BaseException | None = None
        self._threads = threads
        self._apply = self.store.engine.parameters.apply
        self.num_applied = 0
        monkeypatch.setattr(self.store.engine.parameters, "apply", self._apply_when_told)

    def _apply_when_told(self, gradients: Gradients, source: int, *, step: int, draw: int) -> None:
        self.has_begun.set()
        assert self._may_end.wait(LIMIT_S)
        if self._error is not None:
            raise self._error
        self.num_applied += 1
        self._apply(gradients, source, step=step, draw=draw)

    def push(self, worker: int, step: int) -> "Future[int]":
        """Pushes a part in a thread, as a server does."""
        return self.start(
            lambda: self.store.push_grad(
                random_gradients(worker), push_id(worker, step), at=step
            ).result()
        )

    def start(self, call: Callable[[], object]) -> "Future":
        return self._threads.submit(call)

    def begin(self) -> "Future[int]":
        """Starts the application of step 0; returns the push that completed it."""
        self.push(0, 0).result(LIMIT_S)
        push = self.push(1, 0)
        assert self.has_begun.wait(LIMIT_S)
        return push

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._may_end.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> Iterator[HeldStep]:
    step = HeldStep(monkeypatch, threads)
    yield step
    step.end()


def is_pending(call: object) -> bool:
    return isinstance(call, WaitingFuture) and not call.done()


def applied_in_order(num_steps: int) -> ParameterStore:
    store = in_process(num_workers=2)
    for step in range(num_steps):
        for worker in range(2):
            store.push_grad(random_gradients(worker), push_id(worker, step), at=step)
    return store


def test_status_and_arrivals_are_answered_while_a_step_is_applied(held: HeldStep) -> None:
    push = held.begin()

    status = held.store.status()
    barrier = held.store.barrier("b", 0, step=1)
    assert held.store.advance(0, 3, at_least=0).result() == 0
    now = held.store.pull_sparse({"wide": KEYS}, missing=Missing.ZEROS).result()

    assert (status.version, status.progress) == (0, {})
    assert status.examples == {}, "they count when the step is applied"
    assert now.version == 0
    assert not now.rows["wide"].any()
    assert is_pending(barrier)
    assert not push.done()
    assert not held.store.engine.job.all_left()


def test_pull_of_the_next_version_waits_until_its_step_is_applied(held: HeldStep) -> None:
    push = held.begin()
    pull = held.store.pull_sparse({"deep": KEYS}, missing=Missing.INITIAL, at=1)
    dense = held.store.pull_dense({"tower": np.empty(TOWER.length, np.float32)}, at=1)
    assert is_pending(pull)
    assert is_pending(dense)

    held.end()

    expected = applied_in_order(1).pull_sparse({"deep": KEYS}, missing=Missing.INITIAL).result()
    np.testing.assert_array_equal(pull.result().rows["deep"], expected.rows["deep"])
    assert (pull.result().version, dense.result(), push.result(LIMIT_S)) == (1, 1, 1)


def test_barrier_is_released_at_the_version_of_the_steps_before_it(held: HeldStep) -> None:
    push = held.begin()
    barriers = [held.store.barrier("b", worker, step=1) for worker in range(2)]
    assert all(map(is_pending, barriers))

    held.end()

    assert [barrier.result() for barrier in barriers] == [1, 1]
    assert push.result(LIMIT_S) == 1


def test_steps_are_applied_one_after_another(held: HeldStep) -> None:
    """The parts of the next step come while one is applied: their pushes wait for their own step."""
    pushes = [held.begin(), *(held.push(worker, 1) for worker in range(2))]
    assert not pushes[2].done()
    held.has_begun.clear()
    assert not held.has_begun.wait(SOON_S)

    held.end()

    assert max(push.result(LIMIT_S) for push in pushes) == 2
    assert held.num_applied == 2
    assert held.store.digest() == applied_in_order(2).digest()


def test_snapshot_has_a_step_as_a_whole(held: HeldStep, tmp_path: Path) -> None:
    """One that is asked for while a step is applied comes after it, with its version and progress."""
    held.begin()
    saving = held.start(lambda: held.store.save(SaveRequest(url=str(tmp_path / "model"))))
    assert not saving.done()

    held.end()

    saved_digest = saving.result(LIMIT_S)
    assert saved_digest == applied_in_order(1).digest()
    loaded = in_process()
    loaded.load(str(tmp_path / "model"))
    assert loaded.digest() == saved_digest


@pytest.mark.parametrize(("at", "record"), [(None, "arrival_applied"), (0, "step_applied")])
def test_no_snapshot_is_taken_between_a_change_and_its_record(
    at: int | None, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = in_process(wait_limit_s=0.001)
    recorded = getattr(store.engine.job.pushes, record)

    def record_after_a_snapshot(change: object) -> object:
        with pytest.raises(WaitTimeoutError):
            store.engine.snapshot("token")
        return recorded(change)

    monkeypatch.setattr(store.engine.job.pushes, record, record_after_a_snapshot)

    assert store.push_grad(random_gradients(0), push_id(), at=at).result() == 1


def test_leave_returns_when_the_steps_that_it_completes_are_applied(held: HeldStep) -> None:
    held.push(0, 0).result(LIMIT_S)
    leave = held.start(lambda: held.store.leave(1, step=0))
    assert held.has_begun.wait(LIMIT_S)
    last = held.start(lambda: held.store.leave(0, step=1))
    assert not held.store.engine.job.all_left()

    held.end()

    for call in (leave, last):
        call.result(LIMIT_S)
    assert held.store.status().version == 1
    assert held.store.engine.job.all_left()


def test_leave_waits_for_a_step_that_another_call_applies(held: HeldStep) -> None:
    held.begin()
    threading.Timer(SOON_S, held.end).start()

    held.store.leave(0, step=1)

    assert held.store.status().version == 1


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (ValueError("no room"), AbortedError, r"step 0 could .*no room.* in part: .* checkpoint"),
        (
            MemoryError("no room"),
            NoMemoryError,
            r"step 0 .*out of memory \(no room\): .* of memory",
        ),
    ],
)
def test_step_that_cannot_be_applied_fails_for_all(
    error: Exception, raised: type[CtrPsError], text: str, held: HeldStep, tmp_path: Path
) -> None:
    store, push = held.store, held.begin()
    waiting = [
        store.pull_sparse({"wide": KEYS}, missing=Missing.ZEROS, at=1),
        store.barrier("b", 0, step=1),
    ]

    held.end(error)

    with pytest.raises(type(error), match="no room"):
        push.result(LIMIT_S)
    later = [
        lambda: store.push_grad(random_gradients(0), push_id(0, 1), at=1),
        lambda: store.push_grad(random_gradients(0), push_id(0, 1)),
        lambda: store.pull_sparse({"wide": KEYS}, missing=Missing.ZEROS),
        lambda: store.barrier("b", 1, step=1),
        lambda: store.advance(0, 1, at_least=0),
        lambda: store.save(SaveRequest(url=str(tmp_path / "model"))),
    ]
    for call in [*(each.result for each in waiting), *later]:
        with pytest.raises(raised, match=text):
            call()
    assert store.status().version == 0


def test_large_steps_are_applied_in_the_executor(held: HeldStep, threads) -> None:
    """The caller, an event loop, is never held: the push is answered later."""
    held.store.engine.applier.use_executor(threads, inline_values=0)
    first = held.store.push_grad(random_gradients(0), push_id(0), at=0)
    second = held.store.push_grad(random_gradients(1), push_id(1), at=0)
    assert held.has_begun.wait(LIMIT_S)
    assert (first.result(), is_pending(second)) == (0, True)

    held.end()

    assert second.result() == 1
    assert held.store.digest() == applied_in_order(1).digest()


def test_step_that_fails_in_the_executor_is_logged_and_raised(
    held: HeldStep, threads, caplog: pytest.LogCaptureFixture
) -> None:
    held.store.engine.applier.use_executor(threads, inline_values=0)
    for worker in range(2):
        push = held.store.push_grad(random_gradients(worker), push_id(worker), at=0)

    held.end(ValueError("no room"))

    with pytest.raises(CtrPsError, match="no room"):
        push.result()
    assert "step not applied step=0" in caplog.text


def test_step_that_completes_while_another_is_applied_follows_it_in_the_executor(
    held: HeldStep,
) -> None:
    with ThreadPoolExecutor(1) as executor:
        held.store.engine.applier.use_executor(executor, inline_values=0)
        for step in range(2):
            for worker in range(2):
                held.store.push_grad(random_gradients(worker), push_id(worker, step), at=step)

        held.end()

    assert held.store.status().version == 2
    assert held.store.digest() == applied_in_order(2).digest()


def test_small_steps_are_applied_by_the_call_that_completes_them(threads) -> None:
    store = in_process()
    store.engine.applier.use_executor(threads, inline_values=10_000)

    push = store.push_grad(random_gradients(0), push_id(0), at=0)

    assert not isinstance(push, WaitingFuture)
    assert store.status().version == 1


def test_chunks_of_the_last_job_are_forgotten() -> None:
    store = in_process()
    first, *others = split_push(random_gradients(0), 500)
    for chunk in others:
        store.engine.push_chunk(chunk, push_id(sequence=0))

    store.engine.begin_job()

    assert store.engine.push_chunk(first, push_id(sequence=0)).result() == 0
    with pytest.raises(ProtocolError, match="this job has 1 worker"):
        store.engine.push_chunk(first, push_id(worker=1))


def test_abort_while_a_step_is_applied_tells_who_waits_its_reason(held: HeldStep) -> None:
    """Also those in a barrier that the step held back."""
    push = held.begin()
    barriers = [held.store.barrier("b", worker, step=1) for worker in range(2)]

    held.store.abort(1, "no space left")
    held.end()

    push.exception(LIMIT_S)  # applied or told of the abort, but never another error
    for call in barriers:
        with pytest.raises(CtrPsError, match="worker 1 aborted the job: no space left"):
            call.result()


def test_step_for_which_there_is_no_thread_fails_for_all(held: HeldStep) -> None:
    class NoThreads(ThreadPoolExecutor):
        def submit(self, *_: object, **__: object) -> "Future":
            raise RuntimeError("can't start new thread")

    held.end()
    held.store.engine.applier.use_executor(NoThreads(1), inline_values=0)
    held.push(0, 0).result(LIMIT_S)
    waiting = held.store.wait_version(1)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        held.push(1, 0).result(LIMIT_S)

    with pytest.raises(CtrPsError, match=r"step 0 could not be applied: .*can't start new thread"):
        waiting.result()


def test_workers_leave_a_job_that_was_aborted(held: HeldStep) -> None:
    held.store.abort(0, "no space left")

    for worker in range(2):
        held.store.leave(worker, step=0)

    assert held.store.engine.job.all_left()


def test_worker_that_has_left_cannot_abort_the_job(held: HeldStep) -> None:
    held.end()
    held.store.leave(1, step=0)

    with pytest.raises(ProtocolError, match="worker 1 has left"):
        held.store.abort(1, "a late error")

    held.push(0, 0).result(LIMIT_S)
    assert held.store.status().version == 1


@pytest.mark.parametrize("meets", ["declaration", "end of a move"])
def test_rows_are_counted_while_tables_are_declared_or_move(meets: str) -> None:
    store = in_process()
    train(store, 0)
    parameters = store.engine.parameters
    table = parameters.table("deep")
    count_rows = table.loads_of_shards

    def count_late() -> object:
        if meets == "declaration":
            store.create_table(replace(WIDE, name="later"))
        else:
            store.engine.place(ShardMap.of(2), 0)
        return count_rows()

    table.loads_of_shards = count_late  # type: ignore[method-assign, assignment]

    assert parameters.loads_by_place()[0].sum() > 0
