"""What a process runs as, and on."""

import os
import resource
from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Returns the version of this package; "not installed" if it is run from a folder of sources."""
    try:
        return version("ctr-ps")
    except PackageNotFoundError:
        return "not installed"


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


RESERVED_DESCRIPTORS = 256
"""For all but connections of callers: checkpoints, the update log, calls of its own."""

MAX_CONNECTIONS = 16_384
"""Of all callers: each takes some 20 KiB, and a process is no proxy."""


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
