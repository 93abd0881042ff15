"""Calls that wait for others, and the one lock around everything that they wait for.

    event --change--> the rules, under the lock --answers--> futures, without it

The lock is held for decisions only: under it no parameters are read or written, no call is answered and no
other lock is waited for.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar

from ctr_ps.protos.errors import (
    AbortedError,
    NoMemoryError,
    WaitTimeoutError,
    WrongServerError,
)
from ctr_ps.protos.futures import Answered, WaitingFuture
from ctr_ps.protos.store import Future
from ctr_ps.ps_server.coordination.arrivals import Answer, Arrivals
from ctr_ps.ps_server.coordination.steps import StepAggregator

T = TypeVar("T")

Poll = Callable[[], Callable[[], T] | None]
"""Returns how to answer a call, once that is possible; needs the lock."""


class CallQueue:
    """Calls that wait for the same value to change. Not thread-safe.

    Until it has changed none of them is polled: all workers wait for a version while all push, and to poll
    every call at every push would take the square of their number in each step.
    """

    def __init__(self, value: Callable[[], object]) -> None:
        """Starts empty; `value` returns what the calls wait for."""
        self._value = value
        self._polled_at: object = None
        self._calls: list[tuple[WaitingFuture[Any], Poll[Any]]] = []

    def add(self, future: WaitingFuture[Any], poll: Poll[Any]) -> None:
        """Adds a call that is not ready at the present value."""
        if not self._calls:  # else the others may have been polled at an older one
            self._polled_at = self._value()
        self._calls.append((future, poll))

    def remove(self, future: WaitingFuture[Any]) -> None:
        """Removes a call that waits no longer."""
        self._calls = [(other, poll) for other, poll in self._calls if other is not future]

    def take_all(self) -> list[WaitingFuture[Any]]:
        """Removes and returns the futures of all."""
        futures = [future for future, _ in self._calls]
        self._calls.clear()
        return futures

    def take_ready(self) -> list[Answer]:
        """Removes calls that are ready, and returns how to answer them; removes cancelled ones, too."""
        if not self._calls or (value := self._value()) == self._polled_at:
            return []
        self._polled_at = value
        pending = []
        answers: list[Answer] = []
        for future, poll in self._calls:
            if (answer := poll()) is not None:
                answers.append(partial(future.answer_with, answer))
            elif not future.cancelled():
                pending.append((future, poll))
        self._calls = pending
        return answers


class PendingCalls:
    """The lock of a job, the calls that wait, and why it has failed. Thread-safe."""

    def __init__(self, steps: StepAggregator, arrivals: Arrivals, *, wait_limit_s: float) -> None:
        self.lock = threading.Lock()
        self.wait_limit_s = wait_limit_s
        self._arrivals = arrivals
        # calls that wait for a step to be applied
        self.for_version = CallQueue(lambda: steps.version)
        # calls that wait for the slowest worker
        self.for_clocks = CallQueue(arrivals.clocks.slowest)
        self._for_any_change = CallQueue(object)
        # In this order: a call that waits for slower workers is answered when these are in a barrier, before
        # the barrier is released and they count from 0 again.
        self._queues = (self.for_version, self.for_clocks, self._for_any_change)
        self.failure = ""  # why the job has ended before its time; empty: it has not
        self.lacks_memory = False  # whether it has failed since this process has no memory left
        self._has_left = False  # whether this process has no shards any more

    @contextmanager
    def change(self, *, even_if_failed: bool = False) -> Iterator[None]:
        """Holds the lock for an event; then, without it, answers the calls that are ready."""
        with self.lock:
            if not even_if_failed:
                self._require_job()
            yield
            answers = self.take_ready()
        answer_all(answers)

    def take_ready(self) -> list[Answer]:
        """Removes the calls that are ready, and returns how to answer them; needs the lock."""
        if self.failure:
            return []  # `fail` has answered them
        ready = [answer for queue in self._queues for answer in queue.take_ready()]
        return [*ready, *self._arrivals.take_released()]

    def wait(
        self, poll: Poll[T], describe: Callable[[], str], queue: CallQueue | None = None
    ) -> Future[T]:
        """Answers as soon as `poll` says how; not in time: with `describe`, called with the lock.

        A call that is not ready waits in `queue`; None: where it is polled at each change.
        """
        waiting = queue or self._for_any_change
        with self.lock:
            answer = poll()
            if answer is None:
                self._require_job()
                future: WaitingFuture[T] = WaitingFuture(
                    self.wait_limit_s, lambda given_up: self._give_up(waiting, given_up, describe)
                )
                waiting.add(future, poll)
                return future
        return Answered(answer())

    def _give_up(
        self, queue: CallQueue, future: WaitingFuture[Any], describe: Callable[[], str]
    ) -> WaitTimeoutError:
        with self.lock:
            queue.remove(future)
            return WaitTimeoutError(describe())

    def refuse(self, future: WaitingFuture[Any], error: Exception) -> None:
        """Has a call that waited elsewhere raise an error after the present change; needs the lock."""
        self._for_any_change.add(future, lambda: partial(raise_error, error))

    def fail(self, failure: str) -> bool:
        """Ends the job: every call that waits raises, and so does every later one that needs the job.

        Returns whether it had not ended before; else the first reason stays.
        """
        with self.lock:
            is_first = not self.failure
            self.failure = self.failure or failure
            futures = self._take_all()
        for future in futures:
            future.answer_with(self.require_no_failure)
        return is_first

    def move_away(self) -> None:
        """The job goes on elsewhere: every call that waits is refused, and so are those that would wait."""
        with self.lock:
            self._has_left = True
            futures = self._take_all()
        for future in futures:
            future.answer_with(self._require_job)

    def _take_all(self) -> list[WaitingFuture[Any]]:
        futures = [future for queue in self._queues for future in queue.take_all()]
        return [*futures, *self._arrivals.take_all()]

    def _require_job(self) -> None:
        """Raises WrongServerError if the job has moved away; otherwise as `require_no_failure`."""
        self.require_no_failure()
        if self._has_left:
            raise WrongServerError("the shards here have moved away")

    def require_no_failure(self) -> None:
        """Raises AbortedError if the job has ended before its time, NoMemoryError if it lacked memory."""
        if self.failure:
            raise (NoMemoryError if self.lacks_memory else AbortedError)(self.failure)


def answer_all(answers: Iterable[Answer]) -> None:
    """Answers calls; without the lock."""
    for answer in answers:
        answer()


def raise_error(error: Exception) -> NoReturn:
    """Raises an error: the answer of a call that is refused."""
    raise error
