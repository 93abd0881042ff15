"""What a process runs as, and on: version, arguments, processors, open files, memory."""

import ctypes
import errno
import os
import re
import resource
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ctr_ps.protos.errors import NoMemoryError
from ctr_ps.protos.format import FORMAT

_OF_HOME = re.compile(r"((?:--[\w-]+=)?)(~(?:/.*)?)", re.DOTALL)


@cache  # it reads files
def own_version() -> str:
    """Returns the version of this package; "not installed" if it is run from a folder of sources."""
    try:
        return version("ctr-ps")
    except PackageNotFoundError:
        return "not installed"


def toml_value(text: str) -> Any:
    """Returns a value of TOML, or the text itself: quotes around words are optional."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except ValueError:
        return text.strip()


def with_home(value: Any) -> Any:
    """Returns the path `~/x` in the home folder, every such text of tables and lists, all else as it is."""
    match value:
        case str() if value == "~" or value.startswith("~/"):
            return os.path.expanduser(value)  # noqa: PTH111 (its other form fails without a home)
        case Mapping():
            return {key: with_home(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(with_home, value))
    return value


def arguments() -> list[str]:
    """Returns the arguments of a command with `~` as the home folder; shells leave it in `--name=~/x`.

    With `--version` alone it ends the process, after the version and the format.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"ctr-ps {own_version()}, format {FORMAT}")
        raise SystemExit
    found = [(word, _OF_HOME.fullmatch(word)) for word in sys.argv[1:]]
    return [word if home is None else f"{home[1]}{with_home(home[2])}" for word, home in found]


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


RESERVED_DESCRIPTORS = 256
"""For all but connections of callers: checkpoints, the update log, calls of its own."""

MAX_CONNECTIONS = 16_384  # of all callers: each takes some 20 KiB, and a process is no proxy


def connection_limit() -> int:
    """Returns how many connections of callers this process may have.

    Its soft limit of open files is raised to the hard one first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    except (ValueError, OSError):  # the system has a limit beside it
        pass
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, soft - min(RESERVED_DESCRIPTORS, soft // 2))


# Parameters of glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_ON_HEAP = 32 * 2**20  # the largest that glibc takes
_KEPT_FREE = 256 * 2**20


def keep_freed_memory() -> bool:
    """Lets the process keep up to 256 MiB of freed memory instead of giving it back at once.

    Messages and arrays of a few hundred kilobytes come and go with every step. glibc maps and unmaps
    each, and the page faults cost more than the copies: a pull of 20,000 keys of dim 10 over loopback
    took 3.4 ms of processor time, and 1.2 ms with this. Call it before other threads start. Returns whether
    the allocator knows the setting (glibc does; others do without).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP) and mallopt(_M_TRIM_THRESHOLD, _KEPT_FREE)
    )


def memory_error_of(error: BaseException) -> NoMemoryError | None:
    """Returns the error, with numbers, of one that says that the system gives no memory; None: another one.

    Libraries say it as MemoryError, a mapping as an OSError, a thread without a stack as a RuntimeError.
    """
    is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    is_mapping = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_thread or is_mapping):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    allowed = "no limit" if limit == resource.RLIM_INFINITY else f"of {limit >> 20} MiB allowed"
    return NoMemoryError(
        f"out of memory ({str(error) or type(error).__name__}): this process uses {_status_mib('VmRSS')} of "
        f"memory and {_status_mib('VmSize')} of address space ({allowed}); give it more, or use more servers"
    )


def _status_mib(field: str) -> str:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(f"{int(line.split()[1]) >> 10} MiB" for line in lines if line.startswith(field))
    except (OSError, MemoryError, StopIteration):  # another system, or not even memory for that
        return "an unknown size"
