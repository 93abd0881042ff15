"""Futures with a limit: an answer that waits for others says who is missing when they do not come."""

import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

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


def completed(value: T) -> concurrent.futures.Future[T]:
    """Returns a future that is done."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_result(value)
    return future
