"""Lines of the log about calls that take long: sent again, or waiting for other workers.

However many calls there are, a server has one line a minute, and what is waited for one every half minute.
"""

import logging
import threading
import time
from collections.abc import Callable

from ctr_ps.protos.wire.calls import Awaited

logger = logging.getLogger(__name__)

FIRST_WAIT_S = 5.0
"""Of a wait before it is told, and between looks at whether it is to be told again."""
NEXT_WAIT_S = 30.0
SENT_AGAIN_S = 60.0


class CallLog:
    """Logs calls that take long, few lines for many calls. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has told nothing yet; `clock` is in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._told_at: dict[str, float] = {}
        self._sent_again: dict[str, int] = {}  # calls by server, since its last line

    def sends_again(self, server: str, call: str, cause: str) -> None:
        """A call to a server is sent again for the first time; `cause` is a gRPC status."""
        with self._lock:
            calls = self._sent_again.get(server, 0) + 1
            is_told = self._is_due(server, SENT_AGAIN_S)
            self._sent_again[server] = 0 if is_told else calls
        if is_told:
            logger.warning(
                "sends again server=%s call=%s cause=%s calls=%d", server, call, cause, calls
            )

    def waits(self, wait: Awaited, waited_s: float) -> None:
        """A call has waited for `waited_s` seconds, and goes on waiting."""
        with self._lock:
            is_told = self._is_due(wait.kind, NEXT_WAIT_S)
        if is_told:
            logger.info(
                "waiting for workers %sat=%s waited_s=%d", wait.workers, wait.place, waited_s
            )

    def _is_due(self, what: str, pause_s: float) -> bool:
        """Whether nothing was told of this for `pause_s` seconds; then it is told now. Needs the lock."""
        now = self._clock()
        if what in self._told_at and now - self._told_at[what] < pause_s:
            return False
        self._told_at[what] = now
        return True
