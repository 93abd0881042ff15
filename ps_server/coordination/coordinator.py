"""How far the workers of a job have come: their steps, barriers, messages, who has left, who waits for whom.

    push --part of a step--> aggregation.py --complete--> apply      under the lock: steps are in order
    push --on arrival--> apply, version + batches                    without it: tables lock their shards
    pull, barrier, message --> a future, answered by the call that makes it ready

What is decided stands in the sans-IO classes; here is the one lock around them, and the futures of those who
wait. No call is answered under the lock.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn, TypeVar

from protos.chunking import CHUNK_BYTES
from protos.errors import CtrPsError, ProtocolError, WaitTimeoutError
from protos.futures import Answered, WaitingFuture
from protos.gradients import Gradients, sum_gradients
from protos.store import (
    Future,
    Message,
    Numbers,
    PushId,
    Reduced,
    ReduceOp,
    SaveStatus,
    Staleness,
    StoreStatus,
    TableStatus,
    Version,
    WorkerProgress,
    require_numbers,
)
from ps_server.coordination.barrier import Barriers
from ps_server.coordination.clocks import Clocks
from ps_server.coordination.mailbox import Mailbox
from ps_server.coordination.progress import ProgressTracker
from ps_server.coordination.reduction import Contribution, Given, Reductions, reduce_numbers
from ps_server.coordination.steps import StepAggregator
from ps_server.table.changes.subscribers import NOBODY

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A call that waits; `poll` returns how to answer it once that can be done, and needs the lock."""

    future: WaitingFuture[Any]
    poll: Callable[[], Callable[[], Any] | None]


class Coordinator:
    """The workers of one job, as one store sees them. Thread-safe."""

    def __init__(
        self,
        num_workers: int,
        *,
        wait_limit_s: float,
        inbox_bytes: int,
        apply: Callable[[Gradients, int], None],
        applying: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Expects all workers at version 0.

        Args:
            num_workers: Workers of the job.
            wait_limit_s: How long a call waits for other workers, in seconds.
            inbox_bytes: Limit of the messages that wait for one worker.
            apply: Applies gradients that were checked, of a worker or NOBODY alone; thread-safe.
            applying: Held while gradients are applied and noted: who holds it back sees all of a push or
                nothing. The lock is taken before it, never in its block.
        """
        self._num_workers = num_workers
        self._wait_limit_s = wait_limit_s
        self._apply = apply
        self._applying = applying
        self._lock = threading.Lock()
        self._steps = StepAggregator(num_workers)
        self._step_push_ids: dict[Version, list[PushId]] = {}
        self._progress = ProgressTracker()
        self._barriers = Barriers(num_workers)
        self._barrier_futures: dict[tuple[str, int], WaitingFuture[Any]] = {}
        self._reductions = Reductions()
        self._clocks = Clocks(num_workers)
        self._mailbox = Mailbox(num_workers, inbox_bytes=inbox_bytes)
        self._waiters: list[_Waiter] = []
        self._examples: dict[int, int] = {}
        self._staleness = Staleness()
        self._left: set[int] = set()
        self._failure = ""  # why the job ended before its time

    @property
    def version(self) -> Version:
        """Steps applied."""
        return self._steps.version

    def require_member(self, worker: int) -> None:
        """Raises ProtocolError unless the job has this worker."""
        self._steps.require_member(worker)

    def status(
        self, tables: Mapping[str, TableStatus], last_save: SaveStatus | None
    ) -> StoreStatus:
        """Returns what was seen, as the status of a store that has `tables` and was last saved so."""
        with self._lock:
            return StoreStatus(
                version=self._steps.version,
                tables=tables,
                examples=dict(self._examples),
                left=frozenset(self._left),
                staleness=self._staleness,
                progress=self._progress.progress(),
                last_save=last_save,
            )

    def resume(self, version: Version, progress: Mapping[int, WorkerProgress]) -> None:
        """Goes on with an earlier run; its workers' progress holds until they push.

        Raises:
            ProtocolError: If this run has begun, or the other had more workers.
        """
        with self._lock:
            for worker in progress:
                self._steps.require_member(worker)
            self._steps.resume(version)
            self._progress.restore(progress)

    def progress(self) -> Mapping[int, WorkerProgress]:
        """Returns how much of each worker's training is applied.

        Takes no lock that is held while gradients are applied, so whoever holds these back may ask.
        """
        return self._progress.progress()

    # Pushes

    def push_on_arrival(self, gradients: Gradients, push_id: PushId) -> Version:
        """Applies gradients at once, counts them, and returns the version.

        Raises:
            ProtocolError: If a synchronous step waits for parts, or the worker is not of this job.
        """
        with self._lock:
            self._require_no_failure()
            self._steps.begin_arrival(push_id.worker)
        try:
            with self._applying():
                self._apply_and_note(gradients, push_id.worker, [push_id])
        except BaseException:
            with self._lock:
                self._steps.end_arrival(0)
            raise
        with self._change():
            self._count(push_id, version=self._steps.version, batches=push_id.batches)
            return self._steps.end_arrival(push_id.batches)

    def push_part(self, gradients: Gradients, push_id: PushId, step: Version) -> Version:
        """Takes a worker's part of a synchronous step, and returns the version.

        Raises:
            ProtocolError: If the worker is not at this step, or has gradients of no examples.
        """
        if push_id.examples < 1 and (gradients.sparse or gradients.dense):
            raise ProtocolError(
                f"worker {push_id.worker} pushed gradients for step {step} that says it has "
                f"{push_id.examples} examples: a step is divided by the examples of its push ids"
            )
        with self._change():
            self._steps.add(push_id.worker, step, gradients)
            self._step_push_ids.setdefault(step, []).append(push_id)
            self._count(push_id, version=step, batches=1)
        return self.version

    def _apply_and_note(
        self, gradients: Gradients, source: int, push_ids: Sequence[PushId]
    ) -> None:
        self._apply(gradients, source)
        for push_id in push_ids:
            self._progress.note(push_id)

    def _count(self, push_id: PushId, *, version: Version, batches: int) -> None:
        """Counts a push that is applied to `version`; the caller holds the lock."""
        self._staleness = self._staleness.add(max(0, version - push_id.pulled), batches)
        self._examples[push_id.worker] = self._examples.get(push_id.worker, 0) + push_id.examples

    # Waiting

    def at_version(self, at: Version | None, answer: Callable[[], T]) -> Future[T]:
        """Answers once the version is `at`; None answers now.

        The future raises WaitTimeoutError if the version does not come, naming the workers that are behind.
        """
        if at is None:
            return Answered(answer())

        def describe() -> str:
            step = self._steps.version
            return (
                f"version {at} did not come within {self._wait_limit_s:g} s: step {step} lacks the "
                f"gradients of workers {self._steps.behind(step)}; see their logs"
            )

        return self._wait(lambda: answer if self._steps.version >= at else None, describe)

    def _wait(
        self, poll: Callable[[], Callable[[], T] | None], describe: Callable[[], str]
    ) -> Future[T]:
        """Answers as soon as `poll` says how; `describe` says what did not come in time."""

        def give_up() -> WaitTimeoutError:
            with self._lock:
                self._waiters = [waiter for waiter in self._waiters if waiter.future is not future]
                return WaitTimeoutError(describe())

        future: WaitingFuture[T] = WaitingFuture(self._wait_limit_s, give_up)
        with self._lock:
            answer = poll()
            if answer is None:
                self._require_no_failure()
                self._waiters.append(_Waiter(future, poll))
                return future
        return Answered(answer())

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        return self._arrive(name, worker, step, None)

    def all_reduce(
        self, name: str, worker: int, values: Numbers, op: ReduceOp, *, step: Version
    ) -> Future[Reduced]:
        """See `protos.store.Store`."""
        require_numbers(name, values)
        return self._arrive(name, worker, step, Contribution(values.copy(), op))

    def _arrive(
        self, name: str, worker: int, step: Version, contribution: Contribution | None
    ) -> WaitingFuture[Any]:
        future: WaitingFuture[Any] = WaitingFuture(
            self._wait_limit_s, lambda: self._barrier_timeout(name, worker, future)
        )
        with self._change():
            self._barriers.arrive(name, worker)
            self._barrier_futures[name, worker] = future
            self._reductions.give(name, worker, contribution)
            self._steps.leave(worker, step)
            self._clocks.pause(worker)
        return future

    def _barrier_timeout(self, name: str, worker: int, future: Future[Any]) -> WaitTimeoutError:
        with self._lock:
            missing = self._barriers.missing(name)
            places = {other: self._barriers.place_of(other) for other in missing}
            # A worker that has come again waits on by its newer call.
            if self._barrier_futures.get((name, worker)) is future:
                self._barriers.give_up(name, worker)
                del self._barrier_futures[name, worker]
        elsewhere = "".join(
            f"; worker {other} waits at {place!r}" for other, place in places.items() if place
        )
        return WaitTimeoutError(
            f"barrier {name!r}: workers {missing} did not come within {self._wait_limit_s:g} s; "
            f"see their logs{elsewhere}"
        )

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """See `protos.store.Store`."""

        def poll() -> Callable[[], int] | None:
            if self._clocks.behind(at_least):
                return None
            slowest = self._clocks.slowest()
            return lambda: at_least if slowest is None else slowest

        def describe() -> str:
            clocks = self._clocks.behind(at_least).items()
            behind = ", ".join(f"worker {worker} only {clock}" for worker, clock in clocks)
            return (
                f"not all workers finished {at_least} steps within {self._wait_limit_s:g} s: {behind}; "
                f"see their logs"
            )

        with self._change():
            self._clocks.advance(worker, clock, at_least)
        return self._wait(poll, describe)

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`."""

        def poll() -> Callable[[], None] | None:
            if (fault := self._mailbox.fault_of_post(exchange, message)) is not None:
                return partial(_refuse, fault)
            return _nothing if self._mailbox.is_accepted(exchange, message) else None

        def describe() -> str:
            return (
                f"exchange {exchange!r}: worker {message.receiver} took no messages within "
                f"{self._wait_limit_s:g} s, so there is no room for more; see its log"
            )

        with self._change():
            self._mailbox.post(exchange, message)
        return self._wait(poll, describe)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """See `protos.store.Store`."""

        def poll() -> Callable[[], Sequence[Message]] | None:
            messages = self._mailbox.take(exchange, worker, CHUNK_BYTES)
            if messages is not None:
                return lambda: messages
            fault = self._mailbox.fault_of_take(exchange, worker)
            return None if fault is None else partial(_refuse, fault)

        def describe() -> str:
            return (
                f"exchange {exchange!r}: nothing came for worker {worker} within {self._wait_limit_s:g} s: "
                f"workers {self._mailbox.missing(exchange, worker)} have not posted their last "
                f"message; see their logs"
            )

        with self._change():
            self._mailbox.acknowledge(exchange, worker, received)
        return self._wait(poll, describe)

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        with self._change():
            self._steps.require_member(worker)
            self._steps.leave(worker, step)
            self._barriers.leave(worker)
            self._clocks.leave(worker)
            self._mailbox.leave(worker)
            self._left.add(worker)
            self._examples.setdefault(worker, 0)

    def abort(self, worker: int, reason: str) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            self._steps.require_member(worker)
            self._failure = self._failure or f"worker {worker} aborted the job: {reason}"
            futures = [waiter.future for waiter in self._waiters]
            futures += self._barrier_futures.values()
            self._waiters = []
            self._barrier_futures.clear()
        for future in futures:
            future.answer_with(self._require_no_failure)

    def _require_no_failure(self) -> None:
        if self._failure:
            raise CtrPsError(self._failure)

    def all_left(self) -> bool:
        """Whether every worker has left."""
        with self._lock:
            return len(self._left) >= self._num_workers

    # What a change brings about

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Holds the lock for a change; then, without it, answers the calls that can go on."""
        with self._lock:
            self._require_no_failure()
            yield
            answers = self._settle()
        for answer in answers:
            answer()

    def _settle(self) -> list[Callable[[], None]]:
        """Applies the steps that are complete; returns how to answer those who wait no more."""
        with self._applying():  # around the step that is taken, too: it moves the version
            while (parts := self._steps.take_complete_step()) is not None:
                push_ids = self._step_push_ids.pop(self._steps.version - 1)
                examples = sum(push_id.examples for push_id in push_ids)
                gradients = sum_gradients(parts) if examples else Gradients()
                self._apply_and_note(_over_all_examples(gradients, examples), NOBODY, push_ids)
        # In this order: who waits for slower workers goes on as soon as these are in a barrier, before it is
        # released and they count from 0 again.
        return [*self._take_ready(), *self._take_released()]

    def _take_released(self) -> list[Callable[[], None]]:
        answers: list[Callable[[], None]] = []
        for name, workers in self._barriers.take_released().items():
            given = self._reductions.take(name, workers)
            answer = cache(partial(_outcome, name, given, self._steps.version))
            for worker in workers:
                self._steps.rejoin(worker)
                self._clocks.restart(worker)
                future = self._barrier_futures.pop((name, worker))
                answers.append(partial(future.answer_with, answer))
        return [*answers, *self._take_stuck()]

    def _take_stuck(self) -> list[Callable[[], None]]:
        """Ends barriers at which workers wait for each other, each at another one."""
        stuck = self._barriers.take_stuck()
        answers: list[Callable[[], None]] = []
        for name, workers in stuck.items():
            self._reductions.take(name, workers)
            for worker in workers:
                future = self._barrier_futures.pop((name, worker))
                answers.append(partial(future.answer_with, partial(_refuse_stuck, stuck)))
        return answers

    def _take_ready(self) -> list[Callable[[], None]]:
        waiting: list[_Waiter] = []
        answers: list[Callable[[], None]] = []
        for waiter in self._waiters:
            if (answer := waiter.poll()) is not None:
                answers.append(partial(waiter.future.answer_with, answer))
            elif not waiter.future.cancelled():
                waiting.append(waiter)
        self._waiters = waiting
        return answers


def _refuse_stuck(stuck: Mapping[str, Sequence[int]]) -> NoReturn:
    places = "; ".join(f"workers {list(workers)} at {name!r}" for name, workers in stuck.items())
    raise ProtocolError(
        f"workers wait for each other at different barriers, which never ends: {places}; each of them must "
        f"come to the same barriers in the same order"
    )


def _nothing() -> None:
    return None


def _refuse(fault: str) -> NoReturn:
    raise ProtocolError(f"{fault}; all workers must take part in an exchange to its end")


def _outcome(name: str, given: Given, version: Version) -> Version | Reduced:
    """Returns what a barrier says to those whom it releases."""
    values = reduce_numbers(name, given)
    return version if values is None else Reduced(values, version)


def _over_all_examples(gradients: Gradients, examples: int) -> Gradients:
    """Returns the gradients with the step's number of examples: some workers may have sent nothing."""
    return Gradients(
        sparse={name: replace(grad, examples=examples) for name, grad in gradients.sparse.items()},
        dense={name: replace(grad, examples=examples) for name, grad in gradients.dense.items()},
    )
