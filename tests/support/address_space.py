"""Address space and huge pages of this process and its system, and a refusing mmap."""

import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

MMAP = mmap.mmap


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def gives_huge_pages_on_request() -> bool:
    """Whether huge pages are for those who ask alone."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[madvise]" in setting.read_text()


def map_some(granted: Iterable[bool]) -> Callable[..., mmap.mmap]:
    """Returns an mmap that refuses some of the calls."""
    answers = iter(granted)

    def map_or_refuse(*arguments: int) -> mmap.mmap:
        if next(answers):
            return MMAP(*arguments)
        raise OSError("no address space left")

    return map_or_refuse
