"""Background threads of a communicator, with one condition and the first error of any."""

import threading
from collections.abc import Callable

from ctr_ps.protos.errors import ProtocolError, WaitTimeoutError


class Background:
    """Threads that send and receive while others train."""

    def __init__(self, *, stall_limit_s: float, stalled: str) -> None:
        # held while shared state is read or written; notified on changes
        self.changed = threading.Condition()
        self.is_closed = False  # the threads must end
        self._stall_limit_s = stall_limit_s
        self._stalled = stalled
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Runs `work` in a thread; the next call of a training thread raises its error."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                with self.changed:
                    self._error = self._error or error
                    self.changed.notify_all()

        thread = threading.Thread(target=run, name=f"communicator-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def require_health(self) -> None:
        """Raises the first error of the background threads, if any."""
        if self._error is not None:
            raise self._error

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until another thread makes `condition` true; the caller holds `changed`.

        Raises the first error of the background threads, or WaitTimeoutError at the limit.
        """
        arrived = self.changed.wait_for(
            lambda: self._error is not None or condition(), self._stall_limit_s
        )
        self.require_health()
        if not arrived:
            raise WaitTimeoutError(
                f"{self._stalled} within {self._stall_limit_s:g} s; see the logs"
            )

    def close(self) -> None:
        """Stops the threads; waiting threads get an error."""
        with self.changed:
            self.is_closed = True
            self._error = self._error or ProtocolError(
                "the communicator is closed and sends nothing more: make a new one"
            )
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
