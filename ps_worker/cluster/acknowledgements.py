"""Which pushes of a worker's process all servers have acknowledged, so that none may lose them.

pushes acknowledged   0 1 2 . 4      answers may come in any order
told to servers             ^        all of them, without a gap
"""

import threading

from ctr_ps.protos.store import Acknowledged, PushId, Version


class Acknowledgements:
    """The acknowledged pushes of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes = 0
        self._ahead: set[int] = set()
        self._steps: Version = 0

    def note(self, push_id: PushId, at: Version | None) -> None:
        """All servers have acknowledged a push, the part of step `at` or applied on arrival."""
        with self._lock:
            if at is not None:
                self._steps = max(self._steps, at + 1)
                return
            if push_id.sequence >= self._pushes:
                self._ahead.add(push_id.sequence)
            while self._pushes in self._ahead:
                self._ahead.remove(self._pushes)
                self._pushes += 1

    def told(self) -> Acknowledged:
        """Returns what servers are told."""
        with self._lock:
            return Acknowledged(pushes=self._pushes, steps=self._steps)
