"""The answers of calls to several servers, which are all on their way at once."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from protos.errors import CtrPsError
from protos.store import Future

T = TypeVar("T")


def results(calls: Sequence[Future[T]]) -> list[T]:
    """Returns the answers; raises the first error."""
    return [call.result() for call in calls]


def results_when_all_have_ended(calls: Sequence[Future[T]]) -> list[T]:
    """Returns the answers; an error is raised only when no server is at work any more."""
    for call in calls:
        with suppress(CtrPsError):  # raised below
            call.result()
    return results(calls)


class Together(Generic[T]):
    """Several answers on their way, and what they make together."""

    def __init__(self, combine: Callable[[], T]) -> None:
        """Calls `combine` for the answer, each time it is asked for."""
        self._combine = combine

    def result(self) -> T:
        """Waits for all of them; raises what the first of them raises."""
        return self._combine()
