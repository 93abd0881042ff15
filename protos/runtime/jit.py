"""How kernels are compiled, and the arrays that they take.

One process at a time fills numba's cache, and the log says so while users wait for it: several that write it
at once have crashed for others (numba issues 4807 and 10128).
"""

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numba.core.caching import IndexDataCacheFile
from numpy.typing import NDArray

from ctr_ps.protos.errors import UsageError, WaitTimeoutError

P = ParamSpec("P")
R = TypeVar("R")
ScalarT = TypeVar("ScalarT", bound=np.generic)

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_PATIENCE_S = 1.0  # another process that only loads the cache is ready before
_LOCK_NAME = "ctr-ps-compile.lock"


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` to machine code on first use.

    It runs without the GIL, or threads would queue behind one call; the result is cached on disk;
    division follows IEEE 754, as in numpy. No fast-math: sums must not depend on the compiler.
    """
    return _cached(numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def inlined_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` into the kernels that call it, always; for what they do to each row.

    The compiler leaves out calls of small functions by itself, by a guess of what is small. A call that stays
    counts references to every array that it is handed, atomically: for a whole table 60 ns and more.
    """
    inlined = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
    return _cached(inlined(function))


class _CacheFile(IndexDataCacheFile):
    """A kernel's file of the cache, of which an index that cannot be read is empty.

    Numba reads the types of arguments before it looks whether the file is of this source: those of an earlier
    version may be in modules that are gone, and then no kernel would be found or compiled.
    """

    def _load_index(self) -> dict[Any, Any]:
        try:
            found: dict[Any, Any] = super()._load_index()  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError):
            return {}
        return found


def _cached(compiled: Any) -> Callable[..., Any]:
    file = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if type(file) is IndexDataCacheFile:  # else kernels run as Python, or numba has changed
        file.__class__ = _CacheFile
    return cast("Callable[..., Any]", compiled)


def read_only(array: NDArray[ScalarT]) -> NDArray[ScalarT]:
    """Returns a read-only view, as arrays off the wire are: so kernels are compiled for one type only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def default_lock_path() -> Path:
    """Returns the lock's file, in the folder of the cache that it guards."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    folder = given or str(numba.njit(cache=True)(_no_kernel).stats.cache_path)
    return Path(folder, _LOCK_NAME)


def _no_kernel() -> None:
    """Is never compiled; numba tells where it would be cached."""


@contextmanager
def compile_lock(path: Path | None = None, *, limit_s: float = 300.0) -> Iterator[None]:
    """Holds the lock while the caller compiles kernels; the system frees it if the process dies.

    The first kernel that is compiled, and not loaded from the cache, is announced in the log at once.

    Raises:
        UsageError: If the folder of the cache, whose files are run, or the lock in it may be another user's.
        WaitTimeoutError: If another process holds it for longer than `limit_s`.
    """
    path = path or default_lock_path()
    start = time.monotonic()
    is_told = False
    with _open_own(path) as descriptor:
        while not _try_lock(descriptor):
            waited = time.monotonic() - start
            if waited > limit_s:
                raise WaitTimeoutError(
                    f"another process held {path} for {limit_s:g} s to compile kernels: end it if it is "
                    f"stuck (`fuser {path}` prints its id), or run this program again if it is only slow"
                )
            if waited > _PATIENCE_S and not is_told:
                logger.info("waiting for another process, which compiles the same kernels")
                is_told = True
            time.sleep(_RETRY_S)
        with _announced():
            yield


@contextmanager
def _open_own(path: Path) -> Iterator[int]:
    """Opens a lock that is a file of this user's in a folder that others cannot write to."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = path.parent.stat()
        # Neither follows a link nor waits for the other end of a FIFO.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise _unsafe(path, f"cannot be opened: {error.strerror}") from error
    try:
        lock = os.fstat(descriptor)
        # Who owns the package is trusted: its code runs already.
        trusted = {os.geteuid(), 0, Path(__file__).stat().st_uid}
        if not stat.S_ISREG(lock.st_mode):
            raise _unsafe(path, "is not a file")
        if not {lock.st_uid, folder.st_uid} <= trusted or folder.st_mode & stat.S_IWOTH:
            raise _unsafe(path, "or its folder belongs to another user, or others may write there")
        yield descriptor
    finally:
        os.close(descriptor)


def _unsafe(path: Path, fault: str) -> UsageError:
    return UsageError(
        f"the lock of the kernel cache, {path}, {fault}: remove it, or set NUMBA_CACHE_DIR to a folder of "
        "your own"
    )


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
    """Counts the kernels that numba compiles, those that others inline included."""

    def __init__(self) -> None:
        self.kernels = 0  # compiled so far
        self.since = 0.0  # when the first was begun

    def on_start(self, event: event.Event) -> None:
        if not self.kernels:
            self.since = time.monotonic()
            logger.info(
                "compiling kernels: 10 to 20 s on one core at the first start after an installation; later "
                "starts load them"
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
