"""A worker's copies of the dense parameters: one being read, one being written.

    receiver:  buffer = mirror.spare() ... fill ... mirror.publish(buffer)
    trainer:   with mirror.lend() as params: ...          the newest published, unchanged while lent

Training threads never wait for a transfer, and never see half of one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ctr_ps.protos.gradients import Values


class DenseMirror:
    """Copies of one flat vector. Thread-safe; one receiver."""

    def __init__(self, num_params: int) -> None:
        self._num_params = num_params
        self._lock = threading.Lock()
        self._lent: dict[int, int] = {}
        self._buffers = [np.zeros(num_params, np.float32)]
        self._current = 0

    def spare(self) -> int:
        """Returns the number of a buffer that is not lent."""
        with self._lock:
            for number in range(len(self._buffers)):
                if number != self._current and not self._lent.get(number):
                    return number
            # At most one more than there are training threads.
            self._buffers.append(np.zeros(self._num_params, np.float32))
            return len(self._buffers) - 1

    def buffer(self, number: int) -> Values:
        """Returns a buffer by its number."""
        return self._buffers[number]

    def publish(self, number: int) -> None:
        """Makes a filled buffer the one to lend."""
        with self._lock:
            self._current = number

    @contextmanager
    def lend(self) -> Iterator[Values]:
        """Lends the newest parameters."""
        with self._lock:
            number = self._current
            self._lent[number] = self._lent.get(number, 0) + 1
        try:
            yield self._buffers[number]
        finally:
            with self._lock:
                self._lent[number] -= 1
