"""Memory limit of all tables, without measuring their sizes at each push.

After a measurement, the bytes left under the limit may be added before the next one. So far below the limit
a check is a subtraction. Pushes that are checked but not yet applied are in no size, so tables may exceed the
limit by those, and by the doubling of an index.
"""

import threading
from collections.abc import Callable, Mapping

from ctr_ps.protos.errors import UsageError


class MemoryLimit:
    """The limit, at least 1 byte, of all tables, whose bytes `sizes` returns. Thread-safe."""

    def __init__(self, limit_bytes: int, sizes: Callable[[], Mapping[str, int]]) -> None:
        if limit_bytes < 1:
            raise UsageError(f"memory_limit is {limit_bytes!r}, expected at least 1 byte")
        self.limit_bytes = limit_bytes
        self._sizes = sizes
        self._left_bytes = 0  # that may be added before the next look
        self._lock = threading.Lock()

    def is_exceeded(self, most_added_bytes: int) -> bool:
        """Whether tables are larger than the limit, before a push of at most `most_added_bytes` new bytes."""
        with self._lock:
            self._left_bytes -= most_added_bytes
            if self._left_bytes >= 0:
                return False
        total = sum(self._sizes().values())
        with self._lock:
            self._left_bytes = self.limit_bytes - total - most_added_bytes
        return total > self.limit_bytes

    def describe(self) -> str:
        """Returns the limit and the sizes of the tables, the largest first."""
        sizes = sorted(self._sizes().items(), key=lambda size: -size[1])
        tables = ", ".join(f"{name!r} {size}" for name, size in sizes)
        total = sum(size for _, size in sizes)
        return f"tables have {total} bytes ({tables}), more than the memory limit of {self.limit_bytes}"
