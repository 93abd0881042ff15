"""Buffer pool: memory for large arrays, allocated and freed one after another.

The allocator would keep freed memory, separately for each thread: a save of 1 GB left 80 MB behind, which the
next save could not use.
"""

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray


class BufferPool:
    """Buffers of one size, reused once nothing refers to them or a view of them.

    Memory returns to the system with the last reference to the pool and its buffers; untouched pages take
    none. Thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[mmap.mmap] = []

    def take(self) -> NDArray[np.uint8]:
        """Returns a buffer, uint8[size_bytes], with undefined content; raises OSError if memory is short."""
        try:
            memory = self._free.pop()
        except IndexError:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(1, self._size_bytes), flags)
        # Views refer to the array that has the memory, so this one lives as long as the last of them.
        buffer = np.frombuffer(memory, np.uint8, self._size_bytes)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return buffer
