"""One process at a time fills numba's cache.

Several that write it at once have crashed for others (numba issues 4807 and 10128).
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protos.errors import WaitTimeoutError

_RETRY_S = 0.1


def default_lock_path() -> Path:
    """Returns the lock's file, the same for all processes of a user on this machine."""
    return Path(tempfile.gettempdir(), f"ctr-ps-compile-{os.getuid()}.lock")


@contextmanager
def compile_lock(path: Path | None = None, *, limit_s: float = 300.0) -> Iterator[None]:
    """Holds the lock while the caller compiles kernels; the system frees it if the process dies.

    Raises:
        WaitTimeoutError: If another process holds it for longer than `limit_s`.
    """
    path = path or default_lock_path()
    deadline = time.monotonic() + limit_s
    with path.open("a") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"another process has compiled kernels for {limit_s:g} s and holds {path}"
                )
            time.sleep(_RETRY_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
