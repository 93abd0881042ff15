"""Futures: answers with a time limit, answers that are there, and several answers combined."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from protos.errors import CtrPsError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """An answer that may still be on its way."""

    def result(self) -> T_co:
        """Waits for the answer, at most for a time limit of its own, and returns it or raises."""
        ...


class Answer(Future[T_co], Protocol):
    """One of several answers that are waited for together."""

    def wait(self, seconds: float) -> bool:
        """Waits for at most so long; returns whether `result` would not wait."""
        ...

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        """Calls `tell` with the error that it ends with, if any: now, or then from any thread."""
        ...

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it has ended."""
        ...


class WaitingFuture(concurrent.futures.Future[T]):
    """A future whose `result` waits `limit_s` seconds at most.

    Attributes:
        limit_s: How long to wait.
        give_up: Stops waiting and returns the error that says what did not happen.
    """

    def __init__(self, limit_s: float, give_up: Callable[[], CtrPsError]) -> None:
        super().__init__()
        self.limit_s = limit_s
        self.give_up = give_up

    def result(self, timeout: float | None = None) -> T:
        """Returns the answer.

        Raises:
            CtrPsError: `give_up()`, if it does not come within the limit.
        """
        try:
            return super().result(self.limit_s if timeout is None else timeout)
        except TimeoutError:
            error = self.give_up()
        raise error

    def answer_with(self, answer: Callable[[], T]) -> None:
        """Answers with what `answer` returns or raises, unless it was cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(answer())
        except Exception as error:  # carried to the waiting thread, as an executor does
            self.set_exception(error)


class Answered(Generic[T]):
    """A future that was done from the start; a library's costs a lock and a condition for each call."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        """Returns the answer."""
        return self._value


class Combined(Generic[T]):
    """A future of several answers, made into one by a function."""

    __slots__ = ("_combine",)

    def __init__(self, combine: Callable[[], T]) -> None:
        """Calls `combine`, which waits for the answers, each time the result is asked for."""
        self._combine = combine

    def result(self) -> T:
        """Waits for all answers; raises the first error."""
        return self._combine()


class Shared(Generic[T]):
    """A future of several answers that are made into one once, for all who wait for it. Thread-safe."""

    __slots__ = ("_combine", "_lock", "_value")

    def __init__(self, combine: Callable[[], T]) -> None:
        """Calls `combine`, which waits for the answers, until it has returned once."""
        self._combine: Callable[[], T] | None = combine
        self._lock = threading.Lock()

    def result(self) -> T:
        """Waits for all answers; raises the first error."""
        with self._lock:
            if self._combine is not None:
                self._value: T = self._combine()
                self._combine = None
            return self._value


def first_error_of(answers: Sequence[Answer[T]]) -> Sequence[Answer[T]]:
    """Returns the answers, of which the first error of any ends all: it is raised by each still awaited."""

    def fail(error: Exception) -> None:
        for answer in answers:
            answer.fail(error)

    if len(answers) > 1:
        for answer in answers:
            answer.when_failed(fail)
    return answers


def wait_for_all(answers: Sequence[Answer[T]], seconds: float) -> list[Answer[T]]:
    """Waits for all answers together, at most so long; returns those that have ended."""
    until = time.monotonic() + seconds
    return [answer for answer in answers if answer.wait(max(until - time.monotonic(), 0.0))]


def results(answers: Sequence[Answer[T]]) -> list[T]:
    """Returns the answers; raises the first error of any as soon as it comes, however long others take."""
    return [answer.result() for answer in first_error_of(answers)]


def results_of_all_ended(answers: Sequence[Answer[T]]) -> list[T]:
    """Returns the answers; raises the first error, but only after all have ended."""
    for answer in answers:
        with suppress(CtrPsError):  # raised below
            answer.result()
    return results(answers)
