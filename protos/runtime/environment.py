"""What a process runs as, and on."""

import os
import re
import resource
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_OF_HOME = re.compile(r"((?:--[\w-]+=)?)(~(?:/.*)?)", re.DOTALL)


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
    """Returns the arguments of a command with `~` as the home folder; shells leave it in `--name=~/x`."""
    found = [(word, _OF_HOME.fullmatch(word)) for word in sys.argv[1:]]
    return [word if home is None else f"{home[1]}{with_home(home[2])}" for word, home in found]


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
