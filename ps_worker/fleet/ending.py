"""The end of a script that has not finished its role.

A worker that disappears, or a server that never serves, would keep the others waiting for minutes. So a
worker that ends without an error leaves as `fleet.stop_worker()` does, one that ends by an error ends the
job, and a server that has not served ends with an exit code that says so.

    exception, sys.exit(message) --> the script has ended --> abort --> exit code of the error, or 1
    SIGTERM --handler--> a flag --thread--> abort --> the script's calls fail --> it ends --> exit code 143
"""

import atexit
import functools
import logging
import os
import signal
import sys
import threading
import time
from queue import SimpleQueue
from typing import NoReturn

from protos.errors import AbortedError, CtrPsError, TransportError
from ps_worker.fleet.fleet import Fleet
from ps_worker.run.termination import EXIT_CODE, GRACE_S

logger = logging.getLogger(__name__)

_NOT_SERVED = 2


@functools.cache
def watch(fleet: Fleet) -> None:
    """Watches the end of this process, as a server, heter trainer or worker of a cluster."""
    if fleet.is_server():
        _watch_server(fleet, "a server", "run_server")
    elif fleet.is_heter_worker():
        _watch_server(fleet, "a heter trainer", "run_heter_worker")
    elif fleet.server_num():
        _watch_worker(fleet)


def _watch_server(fleet: Fleet, what: str, call: str) -> None:
    """Has this process end with exit code 2 unless it serves before its script ends."""

    def require_served() -> None:
        if fleet.has_served or _uncaught_error() is not None:
            return
        sys.stderr.write(
            f"error: this process is {what}, and its script has ended without fleet.{call}(): call it where "
            f"fleet.is_{call.removeprefix('run_')}()\n"
        )
        sys.stdout.flush()
        os._exit(_NOT_SERVED)  # an exception would not change the exit code any more

    atexit.register(require_served)


class _Sigterm:
    """SIGTERM of a worker's script: it ends the job, and the script by the calls that fail then.

    An exception raised by a handler could leave a lock of gRPC's taken, and the process waiting for it.

    Attributes:
        was_received: Whether there was a signal.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.was_received = False
        self._fleet = fleet
        self._wake: SimpleQueue[None] = SimpleQueue()  # a handler may put while another one does

    def watch(self) -> None:
        """Handles the signal from now on, unless the script does."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, lambda *_: self._receive())
        # A fork has the handler and not the thread: it would outlive `Process.terminate()`.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        threading.Thread(target=self._end_job, name="termination", daemon=True).start()

    def _receive(self) -> None:
        self.was_received = True
        self._wake.put(None)

    def _end_job(self) -> None:
        self._wake.get()
        if not self._fleet.is_running:
            os._exit(EXIT_CODE)
        logger.warning("SIGTERM: this worker ends, and with it the job")
        # In a thread of its own: a server that does not answer must not use up the grace.
        threading.Thread(target=self._abort, daemon=True).start()
        # Not for the script alone: leaving at its end calls servers, too. The end of the process ends this.
        time.sleep(GRACE_S)
        logger.error("not ended within %g s after SIGTERM", GRACE_S)
        os._exit(EXIT_CODE)

    def _abort(self) -> None:
        try:
            self._fleet.abort("it was told to stop (SIGTERM)")
        except CtrPsError as failure:
            logger.warning("other workers could not be told: %s", failure)


class _Exits:
    """Remembers the error that `sys.exit` was given: nothing else tells that end of a script from a good one.

    Attributes:
        error: Of the last call in the main thread; None: there was none, or it was given no error.
    """

    def __init__(self) -> None:
        self.error: SystemExit | None = None

    def record(self) -> None:
        """Records the calls of `sys.exit` from now on."""

        def exit_and_record(status: object = None, /) -> NoReturn:
            error = SystemExit(status)
            if threading.current_thread() is threading.main_thread():
                self.error = error if status else None
            raise error

        sys.exit = exit_and_record


def _watch_worker(fleet: Fleet) -> None:
    """Has this process leave or abort the run when its script ends, if it has not left by then."""
    sigterm, exits = _Sigterm(fleet), _Exits()
    sigterm.watch()
    exits.record()

    def leave_at_end() -> None:
        threading.main_thread().join()
        if (error := _uncaught_error() or exits.error) is not None:
            fleet.abandon(error)
            return
        if not fleet.is_running:
            return
        logger.warning(
            "the script has ended without fleet.stop_worker(): this worker leaves now, call it at the end"
        )
        try:
            fleet.stop_worker()
        except Exception as error:
            logger.exception("this worker could not leave")
            code = _exit_code(error, was_told=sigterm.was_received)
            os._exit(code or 1)  # an exception in a thread would not change the exit code

    def end_with_code() -> None:
        code = _exit_code(_uncaught_error(), was_told=sigterm.was_received)
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # an exception would not change the exit code any more

    # A thread instead of atexit: that comes after threads that wait for work, and may start none for a call.
    threading.Thread(target=leave_at_end, name="leave-at-end").start()
    atexit.register(end_with_code)


def _exit_code(error: BaseException | None, *, was_told: bool) -> int | None:
    """Returns the exit code of a script that ended by `error`; None: Python's.

    Args:
        error: Uncaught; None: there is none.
        was_told: Whether there was a SIGTERM, of which calls that fail are a consequence.
    """
    if was_told and isinstance(error, AbortedError | TransportError):
        return EXIT_CODE
    return error.exit_code if isinstance(error, CtrPsError) else None


def _uncaught_error() -> BaseException | None:
    return getattr(sys, "last_value", None)
