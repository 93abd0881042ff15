"""Memory for large arrays that come and go one after another.

Freed memory would stay with the allocator, apart for each thread that asked for it: a save of 1 GB left 80 MB
behind, and could not use what the one before had left.
"""

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray


class BufferPool:
    """Pieces of one size, taken from the system; used again as soon as nobody holds a view of them.

    All goes back to the system when neither this nor a piece is held any more. Thread-safe.
    """

    def __init__(self, size_bytes: int) -> None:
        """Takes no memory yet.

        Args:
            size_bytes: Of a piece; what is not touched takes no memory.
        """
        self._size_bytes = size_bytes
        self._free: list[mmap.mmap] = []

    def take(self) -> NDArray[np.uint8]:
        """Returns a piece, uint8[size_bytes]; what it holds is undefined.

        Raises:
            OSError: If memory is short.
        """
        try:
            memory = self._free.pop()
        except IndexError:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(1, self._size_bytes), flags)
        # Views of an array hold the array that has the memory, so this one lives as long as the last of them.
        piece = np.frombuffer(memory, np.uint8, self._size_bytes)
        weakref.finalize(piece, self._free.append, memory).atexit = False
        return piece
