"""Counting and logging of malformed rows, up to a limit."""

import logging
import threading

from protos.errors import BadRowError

logger = logging.getLogger(__name__)

MAX_LOGGED_ROWS = 5

_NO_LIMIT = 2**62


class BadRowLog:
    """What the log has of the malformed rows of a dataset: a later pass meets the same ones. Thread-safe."""

    def __init__(self, *, is_silent: bool = False) -> None:
        """Has logged nothing; if it is silent it never will."""
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
        """Logs a row that is one of the first and was not logged before."""
        with self._lock:
            if self.is_full or (path, place) in self._rows:
                return
            self._rows.add((path, place))
        logger.warning("skipped a malformed row: %s file=%s place=%s", fault, path, place)

    def file(self, path: str, verdict: str) -> None:
        """Logs what is wrong with a whole file, unless it was logged before."""
        with self._lock:
            if self._is_silent or path in self._files:
                return
            self._files.add(path)
        logger.warning("no row of a file can be read: file=%s: %s", path, verdict)

    def report(self, text: str) -> None:
        """Logs the figures of a pass, unless they are those of the pass before."""
        with self._lock:
            if text == self._last_report:
                return
            self._last_report = text
        logger.warning("malformed rows skipped: %s", text)


def silent_bad_rows() -> "BadRows":
    """Returns a count without a limit that logs nothing, for rows of which another pass tells."""
    return BadRows(_NO_LIMIT, BadRowLog(is_silent=True))


class BadRows:
    """The malformed rows of one pass over files. Thread-safe.

    Attributes:
        log: Of the dataset that the files belong to.
    """

    def __init__(self, limit: int = 0, log: BadRowLog | None = None) -> None:
        """Allows `limit` malformed rows; one more is an error.

        Args:
            limit: At least 0.
            log: Of the dataset; None: one of this pass alone.

        Raises:
            ValueError: If `limit` is negative.
        """
        if limit < 0:
            raise ValueError(f"bad_row_limit is {limit!r}, expected at least 0")
        self.log = log or BadRowLog()
        self._limit = limit
        self._lock = threading.Lock()
        self._by_file: dict[str, int] = {}
        self._total = 0
        self._first = ""

    @property
    def total(self) -> int:
        """Number of malformed rows so far."""
        return self._total

    @property
    def first(self) -> str:
        """File, place and fault of the first malformed row; "": there is none."""
        return self._first

    @property
    def is_shown(self) -> bool:
        """Whether the next one will be logged or raised, so that its place is worth computing."""
        return not self._total or not self.log.is_full or self._total >= self._limit

    def of_file(self, path: str) -> int:
        """Returns the number of malformed rows of a file so far."""
        return self._by_file.get(path, 0)

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
            self._first = self._first or f"{path}:{place}: {fault}"
            self._by_file[path] = self._by_file.get(path, 0) + 1
            self._total += 1
            total = self._total
        if total > self._limit:
            raise BadRowError(
                f"{path}:{place}: {fault}; this is malformed row {total}, "
                f"and bad_row_limit is {self._limit}"
            )
        self.log.row(path, place, fault)

    def report(self, rows: int) -> None:
        """Logs the number of malformed rows next to that of good `rows`, and the files with the most."""
        if not self._by_file:
            return
        worst = sorted(self._by_file.items(), key=lambda item: (-item[1], item[0]))[:3]
        files = ", ".join(f"{path} ({count})" for path, count in worst)
        self.log.report(f"bad_rows={self._total} rows={rows} most in: {files}")
