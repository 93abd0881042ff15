"""What a process runs as, and on."""

import os
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
