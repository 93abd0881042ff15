"""Counting and logging of malformed rows, up to a limit."""

import logging
import threading

from protos.errors import BadRowError

logger = logging.getLogger(__name__)

MAX_LOGGED_ROWS = 5


class BadRows:
    """The malformed rows of one pass over files. Thread-safe."""

    def __init__(self, limit: int = 0) -> None:
        """Allows `limit` malformed rows; one more is an error.

        Raises:
            ValueError: If `limit` is negative.
        """
        if limit < 0:
            raise ValueError(f"bad_row_limit is {limit!r}, expected at least 0")
        self._limit = limit
        self._lock = threading.Lock()
        self._by_file: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        """Number of malformed rows so far."""
        return self._total

    @property
    def is_shown(self) -> bool:
        """Whether the next one will be logged or raised, so that its place is worth computing."""
        return self._total < MAX_LOGGED_ROWS or self._total >= self._limit

    def add(self, path: str, place: str, fault: str) -> None:
        """Counts a malformed row and logs the first ones.

        Args:
            path: Its file.
            place: Where in the file: "12" for line 12, or "row 12".
            fault: The fault, with the value.

        Raises:
            BadRowError: If the limit is exceeded.
        """
        with self._lock:
            self._by_file[path] = self._by_file.get(path, 0) + 1
            self._total += 1
            total = self._total
        if total > self._limit:
            raise BadRowError(
                f"{path}:{place}: {fault}; this is malformed row {total}, "
                f"and bad_row_limit is {self._limit}"
            )
        if total <= MAX_LOGGED_ROWS:
            logger.warning("skipped a malformed row: %s file=%s place=%s", fault, path, place)

    def report(self, rows: int) -> None:
        """Logs the number of malformed rows next to that of good `rows`, and the files with the most."""
        if not self._by_file:
            return
        worst = sorted(self._by_file.items(), key=lambda item: (-item[1], item[0]))[:3]
        logger.warning(
            "malformed rows skipped: bad_rows=%d rows=%d most in: %s",
            self._total,
            rows,
            ", ".join(f"{path} ({count})" for path, count in worst),
        )
