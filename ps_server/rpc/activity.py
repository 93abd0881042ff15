"""Signs of life: when was the last call, and is one in flight."""

import time
from collections.abc import Callable


class Activity:
    """Counts calls in and out. Not thread-safe: it lives on the server's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight = 0
        self._last = clock()

    def begin(self) -> None:
        """A call came."""
        self._in_flight += 1

    def end(self) -> None:
        """A call was answered."""
        self._in_flight -= 1
        self._last = self._clock()

    def restart(self) -> None:
        """Counts the time without a call from now on."""
        self._last = self._clock()

    @property
    def idle_s(self) -> float:
        """Seconds without a call; 0 while one is in flight, as those that wait for other workers are."""
        return 0.0 if self._in_flight else self._clock() - self._last
