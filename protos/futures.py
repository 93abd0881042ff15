"""Futures with a limit: an answer that waits for others says who is missing when they do not come."""

import concurrent.futures
from collections.abc import Callable
from typing import Generic, TypeVar

from protos.errors import CtrPsError

T = TypeVar("T")


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
        """Answers with what `answer` returns or raises, unless nobody waits any more."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(answer())
        except Exception as error:  # carried to whoever waits, as an executor does
            self.set_exception(error)


class Answered(Generic[T]):
    """A future that was done from the start; a library's costs a lock and a condition for each call."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self) -> T:
        """Returns the answer."""
        return self._value
