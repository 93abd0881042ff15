"""Address space: what this process has, and a system that grants it to some of its callers."""

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

MMAP = mmap.mmap


def address_space() -> int:
    """Returns the bytes of addresses of this process, in use or only reserved."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def map_some(granted: Iterable[bool]) -> Callable[..., mmap.mmap]:
    """Returns an mmap that refuses some of the calls."""
    answers = iter(granted)

    def map_or_refuse(*arguments: int) -> mmap.mmap:
        if next(answers):
            return MMAP(*arguments)
        raise OSError("no address space left")

    return map_or_refuse
