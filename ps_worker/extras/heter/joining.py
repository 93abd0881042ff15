"""Which batches a heter trainer trains on together, and when it comes to a barrier.

    synchronous   one batch of each CPU trainer that it serves and that has not come to a barrier: a step
    otherwise     what is there, in the order in which it came, up to a limit

It comes to a barrier when those that it serves have, since others may take further steps with other heter
trainers. Where it takes over from one that is lost, it serves all.

Sans-IO: events in, decisions out; no clock, no locks.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.wire.heter import Attend

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Joined(Generic[B]):
    """Batches to train on together."""

    batches: Sequence[B]


class Joining(Generic[B]):
    """The batches and barriers of CPU trainers that a heter trainer has not turned to. Not thread-safe.

    Attributes:
        waits_for: The CPU trainers without which it does not come to a barrier, nor synchronously to a step.
    """

    def __init__(self, waits_for: Collection[int], *, is_sync: bool, max_joined: int) -> None:
        """Has no batches.

        Args:
            waits_for: See above.
            is_sync: Whether training is synchronous.
            max_joined: Most batches to join otherwise.
        """
        self.waits_for = set(waits_for)
        self._is_sync = is_sync
        self._max_joined = max_joined
        self._batches: deque[tuple[int, B]] = deque()
        self._attending: dict[int, Attend] = {}

    def add(self, worker: int, batch: B) -> None:
        """Takes a batch of a CPU trainer.

        Raises:
            ProtocolError: If it may not have one now.
        """
        if worker not in self.waits_for:
            raise ProtocolError(
                f"worker {worker} sent a batch to a heter trainer that serves the workers "
                f"{sorted(self.waits_for)}: all processes need the same list of heter trainers"
            )
        if self._is_sync and any(other == worker for other, _ in self._batches):
            raise ProtocolError(
                f"worker {worker} sent a second batch in one synchronous step: set train.thread_num = 1"
            )
        self._batches.append((worker, batch))

    def attend(self, barrier: Attend) -> None:
        """A CPU trainer comes to a barrier."""
        self._attending[barrier.member.worker] = barrier

    def remove(self, workers: Collection[int]) -> list[B]:
        """CPU trainers have left, or are lost; returns their batches, which nobody waits for."""
        self.waits_for.difference_update(workers)
        for worker in workers:
            self._attending.pop(worker, None)
        dropped = [batch for worker, batch in self._batches if worker in workers]
        self._batches = deque(each for each in self._batches if each[0] not in workers)
        return dropped

    def missing(self) -> list[int]:
        """Returns the CPU trainers that others wait for, ascending."""
        here = {worker for worker, _ in self._batches} | self._attending.keys()
        return sorted(self.waits_for - here) if here else []

    def take(self) -> Joined[B] | Attend | None:
        """Returns what to do next; None: nothing, until something comes."""
        if self._attending and not self._batches and self.waits_for <= self._attending.keys():
            barrier = next(iter(self._attending.values()))
            self._attending.clear()
            return barrier
        if not self._batches or (self._is_sync and self.missing()):
            return None
        if self._is_sync:
            step = sorted(self._batches, key=lambda of: of[0])
            self._batches.clear()
            return Joined([batch for _, batch in step])
        number = min(len(self._batches), self._max_joined)
        return Joined([self._batches.popleft()[1] for _ in range(number)])
