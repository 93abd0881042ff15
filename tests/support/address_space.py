"""A system that grants address space to some of its callers."""

import mmap
from collections.abc import Callable, Iterable

MMAP = mmap.mmap


def map_some(granted: Iterable[bool]) -> Callable[..., mmap.mmap]:
    """Returns an mmap that refuses some of the calls."""
    answers = iter(granted)

    def map_or_refuse(*arguments: int) -> mmap.mmap:
        if next(answers):
            return MMAP(*arguments)
        raise OSError("no address space left")

    return map_or_refuse
