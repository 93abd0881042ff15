"""Futures: answers with a time limit, immediate answers, and combinations of several answers."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from ctr_ps.protos.errors import CtrPsError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A pending answer."""

    def result(self) -> T_co:
        """Waits for the answer, up to its own time limit, and returns it or raises."""


class Answer(Future[T_co], Protocol):
    """One of several answers that are waited for together."""

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether the answer has arrived."""

    def when_failed(self, tell: Callable[[Exception], None]) -> None:
        """Calls `tell` with the error if the answer fails or has failed, from any thread."""

    def fail(self, error: Exception) -> None:
        """Fails the answer unless it is complete."""

    def sent(self) -> Any:
        """Returns the argument of the call, as it was when it was started."""


class WaitingFuture(concurrent.futures.Future[T]):
    """A future whose `result` waits up to `limit_s` seconds, then raises the error that `give_up` returns."""

    def __init__(self, limit_s: float, give_up: Callable[[Any], CtrPsError]) -> None:
        """Is pending; `give_up` gets this, as a reference of its own would be a circle around the answer."""
        super().__init__()
        self.limit_s = limit_s
        self._give_up = give_up

    def give_up(self) -> CtrPsError:
        """Returns the error of an answer that does not come."""
        return self._give_up(self)

    def result(self, timeout: float | None = None) -> T:
        """Returns the answer; raises `give_up()` if it does not come within the limit."""
        try:
            return super().result(self.limit_s if timeout is None else timeout)
        except TimeoutError:
            error = self.give_up()
        raise error

    def answer_with(self, answer: Callable[[], T]) -> None:
        """Completes with what `answer` returns or raises, unless cancelled."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(answer())
        except Exception as error:  # carried to the waiting thread, as an executor does
            self.set_exception(error)


class Answered(Generic[T]):
    """An immediate answer; one of concurrent.futures costs a lock and a condition per call."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        """Returns the answer."""
        return self._value


class Combined(Generic[T]):
    """A future that `combine` makes from several answers, each time the result is requested."""

    __slots__ = ("_combine",)

    def __init__(self, combine: Callable[[], T]) -> None:
        self._combine = combine

    def result(self) -> T:
        """Waits for all answers; raises the first error."""
        return self._combine()


class Shared(Generic[T]):
    """A future that `combine` makes from several answers once, for all waiting threads. Thread-safe."""

    __slots__ = ("_combine", "_lock", "_value")

    def __init__(self, combine: Callable[[], T]) -> None:
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
    """Returns the answers, linked: the first error of one fails all pending ones."""

    def fail(error: Exception) -> None:
        for answer in answers:
            answer.fail(error)

    if len(answers) > 1:
        for answer in answers:
            answer.when_failed(fail)
    return answers


def wait_for_all(answers: Sequence[Answer[T]], seconds: float) -> list[Answer[T]]:
    """Waits up to `seconds` for all answers together; returns the complete ones."""
    until = time.monotonic() + seconds
    return [answer for answer in answers if answer.wait(max(until - time.monotonic(), 0.0))]


def results(answers: Sequence[Answer[T]]) -> list[T]:
    """Returns the answers; raises the first error of any as soon as it arrives."""
    return [answer.result() for answer in first_error_of(answers)]


def results_of_all_ended(answers: Sequence[Answer[T]]) -> list[T]:
    """Returns the answers; raises the first error after all have ended."""
    for answer in answers:
        with suppress(CtrPsError):  # raised below
            answer.result()
    return results(answers)
