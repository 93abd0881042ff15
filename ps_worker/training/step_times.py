"""Seconds of training steps by part, summed over the training threads of a worker.

read       the next batch from the data
pull       its unique keys, and waiting for their rows; in synchronous training for the other workers, too;
           where rows come with a push (`Parameters.push_pull`), for that
compute    forward and backward
push       handing the gradients over; in lockstep with several threads until the servers have them
"""

import threading
from collections.abc import Mapping
from typing import Literal, get_args

Part = Literal["read", "pull", "compute", "push"]


class StepTimes:
    """Seconds by part. Thread-safe."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._taken = dict(self._seconds)
        self._lock = threading.Lock()

    def add(self, part: Part, seconds: float) -> None:
        """Adds what a thread took for a part of one step."""
        with self._lock:
            self._seconds[part] += seconds

    def take(self) -> Mapping[Part, float]:
        """Returns the seconds since the last call."""
        totals = self.totals()
        with self._lock:
            before, self._taken = self._taken, totals
        return {part: seconds - before[part] for part, seconds in totals.items()}

    def totals(self) -> dict[Part, float]:
        """Returns all seconds so far."""
        with self._lock:
            return dict(self._seconds)
