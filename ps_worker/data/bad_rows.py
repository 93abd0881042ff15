"""Counting and logging of malformed rows, up to a limit."""

import logging
import threading
from collections.abc import Callable

from ctr_ps.protos.errors import BadRowError

logger = logging.getLogger(__name__)

MAX_LOGGED_ROWS = 5

_NO_LIMIT = 2**62


class BadRowLog:
    """Logged malformed rows of a dataset, so that later passes do not repeat them. Thread-safe."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._lock = threading.Lock()
        self._rows: set[tuple[str, str]] = set()
        self._files: set[str] = set()
        self._last_report = ""

    @property
    def is_full(self) -> bool:
        """Whether no further row will be logged."""
        return self._is_silent or len(self._rows) >= MAX_LOGGED_ROWS

    def row(self, path: str, place: str, fault: str) -> None:
        """Logs a row that is among the first and was not logged before."""
        with self._lock:
            if self.is_full or (path, place) in self._rows:
                return
            self._rows.add((path, place))
        logger.warning("skipped a malformed row: %s file=%s place=%s", fault, path, place)

    def file(self, path: str, verdict: str) -> None:
        """Logs the fault of a whole file, unless it was logged before."""
        with self._lock:
            if self._is_silent or path in self._files:
                return
            self._files.add(path)
        logger.warning("a file has no readable row: file=%s: %s", path, verdict)

    def report(self, text: str) -> None:
        """Logs the figures of a pass, unless they equal those of the last pass."""
        with self._lock:
            if text == self._last_report:
                return
            self._last_report = text
        logger.warning("malformed rows skipped: %s", text)


def silent_bad_rows() -> "BadRows":
    """Returns a silent count without a limit, for rows that another pass reports."""
    return BadRows(_NO_LIMIT, BadRowLog(is_silent=True))


class BadRows:
    """The malformed rows of one pass over files, or of each over a stream. Thread-safe."""

    def __init__(self, limit: int = 0, log: BadRowLog | None = None) -> None:
        """Allows `limit` malformed rows, at least 0; without a `log` they are logged for this pass alone."""
        self.log = log or BadRowLog()
        self._limit = limit
        self._lock = threading.Lock()
        self._by_file: dict[str, int] = {}
        self.total = 0  # malformed rows so far
        self._before = 0  # in passes before this one
        self.first = ""  # file, place and fault of the first one

    def begin_pass(self) -> None:
        """Those so far count to the limit no more."""
        with self._lock:
            self._before, self.first = self.total, ""
            self._by_file.clear()

    def of_file(self, path: str) -> int:
        """Returns the number of malformed rows of a file so far."""
        return self._by_file.get(path, 0)

    def add(self, path: str, place: str | Callable[[], str], fault: str) -> None:
        """Counts a malformed row and logs the first ones; raises BadRowError above the limit.

        `place` is its place in the file: "12" for line 12, or "row 12"; a function is called only if that is
        shown, as finding a line takes a pass over those before it. `fault` includes the value.
        """
        if not isinstance(place, str):
            number = self.total - self._before
            is_shown = not number or not self.log.is_full or number >= self._limit
            place = place() if is_shown else ""
        with self._lock:
            self.first = self.first or f"{path}:{place}: {fault}"
            self._by_file[path] = self._by_file.get(path, 0) + 1
            self.total += 1
            total = self.total - self._before
        if total > self._limit:
            raise BadRowError(
                f"{path}:{place}: {fault}; this is malformed row {total}, "
                f"and bad_row_limit is {self._limit}"
            )
        self.log.row(path, place, fault)

    def report(self, rows: int) -> None:
        """Logs the number of malformed rows beside that of good `rows`, and the files with the most."""
        if not self._by_file:
            return
        worst = sorted(self._by_file.items(), key=lambda item: (-item[1], item[0]))[:3]
        files = ", ".join(f"{path} ({count})" for path, count in worst)
        self.log.report(f"bad_rows={self.total - self._before} rows={rows} most in: {files}")
