"""Answers of calls that may be carried out once only, for the same call again whose answer was lost."""

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Answers:
    """The last answers of one caller to one RPC, by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    by_number: dict[Hashable, Any] = field(default_factory=dict)


class CompletedCalls:
    """Remembers answers. Thread-safe; the same call again waits for the first."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, _Answers] = {}

    def once(
        self, caller: Hashable, number: Hashable, call: Callable[[], T], *, remembered: int
    ) -> T:
        """Returns what `call` returns, or returned to the same caller under the same number.

        A call that raises is not remembered, and of others only the last `remembered` of this caller.
        """
        answers = self._of(caller)
        with answers.lock:
            if number in answers.by_number:
                answer: T = answers.by_number[number]
                return answer
            answer = answers.by_number[number] = call()
            while len(answers.by_number) > remembered:
                del answers.by_number[next(iter(answers.by_number))]
            return answer

    def answers(self, caller: Hashable) -> dict[Any, Any]:
        """Returns what is remembered of a caller, by number."""
        return dict(self._of(caller).by_number)

    def restore(self, caller: Hashable, by_number: Mapping[Any, Any]) -> None:
        """Takes over what `answers` returned."""
        self._of(caller).by_number.update(by_number)

    def _of(self, caller: Hashable) -> _Answers:
        return self._answers.setdefault(caller, _Answers())  # in one operation, for all threads
