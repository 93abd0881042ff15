"""The answers of calls to several servers, which are all on their way at once."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

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
