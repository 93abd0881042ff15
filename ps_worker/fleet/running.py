"""The one run of this process, and its end where a script has not finished its role.

A worker that disappears, or a server that never serves, would keep the others waiting for minutes. So a
worker that ends by an error, or without `fleet.stop_worker()`, ends the job, and a server that has not served
ends with an exit code that says so.

    exception        --> the script has ended --> abort --> exit code of the error, or 1
    no stop_worker() --> the script has ended --> abort --> exit code 2, whatever `sys.exit` was given
    SIGTERM --handler--> a flag --thread--> abort --> the script's calls fail --> it ends --> exit code 143
"""

import atexit
import functools
import os
import signal
import sys
import threading

from ctr_ps.protos.errors import AbortedError, CtrPsError, TransportError
from ctr_ps.ps_worker.fleet.fleet import Fleet
from ctr_ps.ps_worker.run.termination import EXIT_CODE, Termination

_LACKS_A_CALL = 2


@functools.cache
def _watch(fleet: Fleet) -> None:
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
            f"error: this process is {what}, but its script ended without fleet.{call}(): call it where "
            f"fleet.is_{call.removeprefix('run_')}()\\n"
        )
        sys.stdout.flush()
        os._exit(_LACKS_A_CALL)  # an exception would not change the exit code any more

    atexit.register(require_served)


class ScriptEndedError(CtrPsError):
    """A worker's script has ended without `fleet.stop_worker()`; what it has not sent is lost."""

    exit_code = _LACKS_A_CALL
    comes_again = True


def _watch_worker(fleet: Fleet) -> None:
    """Has this process abort the run when its script ends by an error, or without `fleet.stop_worker()`."""
    termination = Termination()
    is_main = threading.current_thread() is threading.main_thread()
    # SIGTERM ends the job, and the script by the calls that fail then, unless the script handles it.
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        termination.abort_at(lambda: fleet.place)
        termination.start()
        # A fork has the handler and not the thread: it would outlive `Process.terminate()`.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    error: BaseException | None = None

    def abort_at_end() -> None:
        nonlocal error
        threading.main_thread().join()
        error = _uncaught_error()
        if error is None and fleet.needs_stop_worker:
            error = ScriptEndedError(
                "the script ended without fleet.stop_worker(): call it at the end; to report an error, "
                "raise an exception instead of sys.exit()"
            )
            sys.stderr.write(f"error: {error}\n")
        fleet.abandon(error)

    def end_with_code() -> None:
        if not isinstance(error, CtrPsError):
            return  # with Python's exit code
        # Where there was a SIGTERM, calls that fail are a consequence of it.
        was_told = termination.was_asked and isinstance(
            error, AbortedError | TransportError | ScriptEndedError
        )
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception would not change the exit code any more.
        os._exit(EXIT_CODE if was_told else error.exit_code)

    # A thread instead of atexit: that comes after threads that wait for work, and may start none for a call.
    threading.Thread(target=abort_at_end, name="abort-at-end").start()
    atexit.register(end_with_code)


def _uncaught_error() -> BaseException | None:
    return getattr(sys, "last_value", None)


FLEET = Fleet(on_role=_watch)
