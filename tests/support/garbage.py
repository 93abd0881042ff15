"""What lives on without a reference, in circles, until Python's garbage collector comes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Has the collector come before the block and after it, and not in it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def num_alive(kind: type) -> int:
    """Returns the number of objects of a class."""
    return sum(type(each) is kind for each in gc.get_objects())
