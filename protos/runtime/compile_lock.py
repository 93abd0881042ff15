"""One process at a time fills numba's cache, and the log says so while users wait for it.

Several that write it at once have crashed for others (numba issues 4807 and 10128).
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numba.core import event

from protos.errors import WaitTimeoutError

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_PATIENCE_S = 1.0  # another process that only loads the cache is ready before


def default_lock_path() -> Path:
    """Returns the lock's file, the same for all processes of a user on this machine."""
    return Path(tempfile.gettempdir(), f"ctr-ps-compile-{os.getuid()}.lock")


@contextmanager
def compile_lock(path: Path | None = None, *, limit_s: float = 300.0) -> Iterator[None]:
    """Holds the lock while the caller compiles kernels; the system frees it if the process dies.

    The first kernel that is compiled, and not loaded from the cache, is announced in the log at once.

    Raises:
        WaitTimeoutError: If another process holds it for longer than `limit_s`.
    """
    path = path or default_lock_path()
    start = time.monotonic()
    is_told = False
    with path.open("a") as file:
        while not _try_lock(file.fileno()):
            waited = time.monotonic() - start
            if waited > limit_s:
                raise WaitTimeoutError(
                    f"waited {limit_s:g} s for the process that holds {path} while it compiles kernels: end "
                    f"it if it is stuck (`fuser {path}` tells its id), or start again if it is only slow"
                )
            if waited > _PATIENCE_S and not is_told:
                logger.info("waits for another process, which compiles kernels for both")
                is_told = True
            time.sleep(_RETRY_S)
        with _announced():
            yield


@contextmanager
def _announced() -> Iterator[None]:
    """Logs that kernels are compiled when the first is, and afterwards how many and for how long."""
    compiled = _Compiled()
    with event.install_listener("numba:compile", compiled):
        yield
    if compiled.kernels:
        logger.info(
            "kernels compiled kernels=%d seconds=%.1f",
            compiled.kernels,
            time.monotonic() - compiled.since,
        )


class _Compiled(event.Listener):
    """Counts the kernels that numba compiles, those that others inline included.

    Attributes:
        kernels: Compiled so far.
        since: When the first was begun.
    """

    def __init__(self) -> None:
        self.kernels = 0
        self.since = 0.0

    def on_start(self, event: event.Event) -> None:
        """Numba begins to compile."""
        if not self.kernels:
            self.since = time.monotonic()
            logger.info(
                "compiles kernels: on the first start after an installation, some 10 to 20 s on one core; "
                "later starts load them"
            )
        self.kernels += 1

    def on_end(self, event: event.Event) -> None:
        """Numba has compiled."""


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
