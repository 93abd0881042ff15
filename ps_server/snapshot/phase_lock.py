"""Phase-fair readers-writer lock: shared by many or held alone by one, and neither side starves.

    shared:    | push | push |           | push | push | push
    alone:            . waits | snapshot |
    shared:              . waits         | push

A caller that wants it alone waits for those that share it. Callers that come meanwhile wait behind it, and
are before the next that wants it alone. So a stream of pushes does not starve a snapshot, nor the reverse.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ctr_ps.protos.errors import WaitTimeoutError


class PhaseLock:
    """A phase-fair readers-writer lock. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._waiting_to_share = 0
        self._waiting_alone = 0
        self._is_alone = False
        self._phase = 0  # times that it was held alone
        self._owed = 0  # callers that waited to share when that ended, and are next

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Shares the lock; waits while another holds it alone."""
        with self._changed:
            if self._is_alone or self._waiting_alone:
                self._wait_to_share()
            self._sharing += 1
        try:
            yield
        finally:
            with self._changed:
                self._sharing -= 1
                if not self._sharing:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, limit_s: float) -> Iterator[None]:
        """Holds the lock alone; raises WaitTimeoutError if it is shared for longer than `limit_s` seconds."""
        with self._changed:
            self._waiting_alone += 1
            try:
                if not self._changed.wait_for(self._is_free, limit_s):
                    raise WaitTimeoutError(
                        f"running pushes did not end within {limit_s:g} s, so parameters could not be saved "
                        "or replaced"
                    )
                self._is_alone = True
            finally:
                self._waiting_alone -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._phase += 1
                self._owed = self._waiting_to_share
                self._changed.notify_all()

    def _is_free(self) -> bool:
        return not (self._is_alone or self._sharing or self._owed)

    def _wait_to_share(self) -> None:
        phase = self._phase
        self._waiting_to_share += 1
        self._changed.wait_for(
            lambda: not self._is_alone and (self._phase != phase or not self._waiting_alone)
        )
        self._waiting_to_share -= 1
        if self._owed:
            self._owed -= 1
