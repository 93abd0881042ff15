"""Stamps of one worker's pushes: numbered without gaps, across threads."""

import secrets
import threading

from protos.store import Stamp, Version


class StampBook:
    """Makes the stamps of one run of one worker. Thread-safe."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._incarnation = secrets.randbits(63)
        self._sequence = 0
        self._lock = threading.Lock()

    def next(self, *, step: int, examples: int, batches: int, pulled: Version) -> Stamp:
        """Returns the stamp of the next push."""
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
        return Stamp(
            worker=self._worker,
            incarnation=self._incarnation,
            sequence=sequence,
            step=step,
            examples=examples,
            batches=batches,
            pulled=pulled,
        )
