"""The end of a script that has not finished its role.

A worker that disappears, or a server that never serves, would keep the others waiting for minutes. So a
worker that ends by an error, or without `fleet.stop_worker()`, ends the job, and a server that has not served
ends with an exit code that says so.

    exception        --> the script has ended --> abort --> exit code of the error, or 1
    no stop_worker() --> the script has ended --> abort --> exit code 2, whatever `sys.exit` was given
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

from protos.errors import AbortedError, CtrPsError, TransportError
from ps_worker.fleet.fleet import Fleet
from ps_worker.run.termination import EXIT_CODE, GRACE_S

logger = logging.getLogger(__name__)

_LACKS_A_CALL = 2


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
        os._exit(_LACKS_A_CALL)  # an exception would not change the exit code any more

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


class ScriptEndedError(CtrPsError):
    """A worker's script has ended without `fleet.stop_worker()`; what it has not sent is lost."""

    exit_code = _LACKS_A_CALL
    comes_again = True


def _watch_worker(fleet: Fleet) -> None:
    """Has this process abort the run when its script ends by an error, or without `fleet.stop_worker()`."""
    sigterm = _Sigterm(fleet)
    sigterm.watch()
    error: BaseException | None = None

    def abort_at_end() -> None:
        nonlocal error
        threading.main_thread().join()
        error = _uncaught_error()
        if error is None and fleet.needs_stop_worker:
            error = ScriptEndedError(
                "the script has ended without fleet.stop_worker(): call it at the end, and end by an "
                "exception, not sys.exit(), where something is wrong"
            )
            sys.stderr.write(f"error: {error}\n")
        fleet.abandon(error)

    def end_with_code() -> None:
        code = _exit_code(error, was_told=sigterm.was_received)
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # an exception would not change the exit code any more

    # A thread instead of atexit: that comes after threads that wait for work, and may start none for a call.
    threading.Thread(target=abort_at_end, name="abort-at-end").start()
    atexit.register(end_with_code)


def _exit_code(error: BaseException | None, *, was_told: bool) -> int | None:
    """Returns the exit code of a script that ended by `error`; None: Python's.

    Args:
        error: Uncaught; None: there is none.
        was_told: Whether there was a SIGTERM, of which calls that fail are a consequence.
    """
    if was_told and isinstance(error, AbortedError | TransportError | ScriptEndedError):
        return EXIT_CODE
    return error.exit_code if isinstance(error, CtrPsError) else None


def _uncaught_error() -> BaseException | None:
    return getattr(sys, "last_value", None)
