"""What a process runs as, and on."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # it reads files
def own_version() -> str:
    """Returns the version of this package; "not installed" if it is run from a folder of sources."""
    try:
        return version("ctr-ps")
    except PackageNotFoundError:
        return "not installed"


def version_term() -> dict[str, str]:
    """Returns the term by which processes find out that they are of different versions."""
    return {"version of ctr-ps": own_version()}


def num_processors() -> int:
    """Returns the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux has it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
