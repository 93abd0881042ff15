"""The end of a script that has not finished its role.

A worker that disappears, or a server that never serves, would keep the others waiting for minutes. So a
worker that ends without an error leaves as `fleet.stop_worker()` does, one that ends by an error ends the
job, and a server that has not served ends with an exit code that says so.
"""

import atexit
import functools
import logging
import os
import sys
import threading

from ps_worker.fleet.fleet import Fleet

logger = logging.getLogger(__name__)

_NOT_SERVED = 2


@functools.cache
def watch(fleet: Fleet) -> None:
    """Watches the end of this process, as a server or as a worker of a cluster."""
    if fleet.is_server():
        _watch_server(fleet)
    elif fleet.server_num():
        _watch_worker(fleet)


def _watch_server(fleet: Fleet) -> None:
    """Has this process end with exit code 2 unless it serves before its script ends."""

    def require_served() -> None:
        if fleet.has_served or _error_that_ended_the_script() is not None:
            return
        print(
            "error: this process is a server, and its script has ended without fleet.run_server(): "
            "call it where fleet.is_server()",
            file=sys.stderr,
        )
        sys.stdout.flush()
        os._exit(_NOT_SERVED)  # an exception would not change the exit code any more

    atexit.register(require_served)


def _watch_worker(fleet: Fleet) -> None:
    """Has this process leave the run when its script ends, if it has not left by then."""

    def leave_at_end() -> None:
        threading.main_thread().join()
        if not fleet.is_running:
            return
        if (error := _error_that_ended_the_script()) is not None:
            fleet.abandon(error)
            return
        logger.warning(
            "the script has ended without fleet.stop_worker(): this worker leaves now, call it at the end"
        )
        try:
            fleet.stop_worker()
        except Exception:
            logger.exception("this worker could not leave")
            os._exit(1)  # an exception in a thread would not change the exit code

    # A thread instead of atexit: that comes after threads that wait for work, and may start none for a call.
    threading.Thread(target=leave_at_end, name="leave-at-end").start()


def _error_that_ended_the_script() -> BaseException | None:
    return getattr(sys, "last_value", None)
