"""A lock that many share or one has alone, and for which neither waits for ever.

    sharing:   | push | push |      | push | push | push
    alone:            . waits | cut |
    sharing:             . waits    | push

Who wants it alone waits for those that have it; those who come meanwhile wait behind it, and go before the
next who wants it alone. So a stream of pushes does not keep a cut away, nor a stream of cuts the pushes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import WaitTimeoutError


class SharedLock:
    """A readers-writer lock in phases. Not reentrant."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0
        self._waiting_to_share = 0
        self._waiting_alone = 0
        self._is_alone = False
        self._phase = 0  # how often it was had alone
        self._owed = 0  # who waited to share when that ended, and goes first

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the lock with others; whoever has it alone is done soon."""
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
        """Holds the lock alone.

        Raises:
            WaitTimeoutError: If those who share it keep it for longer than `limit_s` seconds.
        """
        with self._changed:
            self._waiting_alone += 1
            try:
                if not self._changed.wait_for(self._is_free, limit_s):
                    raise WaitTimeoutError(
                        f"pushes that are being applied did not end within {limit_s:g} s: parameters "
                        f"cannot be cut or replaced between two of them"
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
