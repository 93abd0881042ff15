"""Backlog: calls that wait for a thread or have one, and when a server takes no more of them.

A server that is asked for more than it can do would keep every request in memory until its client gives up.
Beyond a limit it refuses calls before it decodes them, and says when to try again.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ctr_ps.protos.errors import OverloadedError
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.security.access import Access

logger = logging.getLogger(__name__)

MAX_CALLS = 512
"""Calls with much work that wait for a thread, or have one.

A push of 35,000 keys of dim 10 took 5 ms, one of 80,000 (4 MB) 11 ms, on two cores with the client: so the
last of them begins after 3 to 6 s, where a call may take 60.
"""

MAX_BYTES = 512 * 2**20
"""Bytes of their requests. The same pushes were applied at 340 MB/s, so this is 1.6 s of work."""

RETRY_AFTER_S = 1.0
"""Until then, a good part of a full backlog is done."""


class Backlog:
    """Counts the calls in threads. Not thread-safe: it lives on the server's event loop."""

    def __init__(self, *, max_calls: int = MAX_CALLS, max_bytes: int = MAX_BYTES) -> None:
        """Has no calls, and takes more until there are `max_calls`, or `max_bytes` of their requests."""
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self.num_calls = 0  # calls that wait for a thread, or have one
        self.num_bytes = 0  # bytes of their requests
        self.num_refused = 0  # calls that were refused so far
        self._is_refusing = False

    @contextmanager
    def holding(self, request_bytes: int) -> Iterator[None]:
        """Counts a call with a request of `request_bytes` for the time of the block."""
        self.num_calls += 1
        self.num_bytes += request_bytes
        try:
            yield
        finally:
            self.num_calls -= 1
            self.num_bytes -= request_bytes

    def require_room(self, call: Call[Any, Any]) -> None:
        """Raises OverloadedError if `call` moves data and the backlog is at a limit.

        Not a driver's: it has one such call at a time, and pushes may wait for the end of its move.
        """
        if not call.moves_data or call.access is Access.ADMIN:
            return
        is_full = self.num_calls >= self._max_calls or self.num_bytes >= self._max_bytes
        if is_full and not self._is_refusing:
            logger.warning(
                "overloaded, calls are refused calls=%d bytes=%d", self.num_calls, self.num_bytes
            )
        self._is_refusing = is_full
        if is_full:
            self.num_refused += 1
            raise OverloadedError(
                f"this server is overloaded: {self.num_calls} calls with {self.num_bytes} bytes wait; its "
                f"limits are {self._max_calls} calls and {self._max_bytes} bytes. Try {call.name} again in "
                f"{RETRY_AFTER_S:g} s; if this lasts, use more servers or fewer workers",
                retry_after_s=RETRY_AFTER_S,
            )
