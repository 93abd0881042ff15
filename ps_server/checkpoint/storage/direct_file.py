"""A new file of a local file system, written once from its beginning to its end.

    write --copied--> buffer --when it is full--> disk, past the page cache

Nobody reads a checkpoint soon, so its pages would only push out others; and to put 880 MB into the page
cache took 0.3 to 2.4 s of processor time, to write them past it 0.05 s. A file system that has no such way
gets the same pieces through the page cache, and is made to write them to disk now and then.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

BUFFER_BYTES = 4 * 2**20
"""Written at once. A multiple of the blocks of all disks, as the way past the page cache needs."""

FORCE_BYTES = 64 * 2**20
"""How much the page cache may hold before the disk is made to write it: by itself it begins after seconds.

A multiple of `BUFFER_BYTES`.
"""

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it
_NO_SUCH_WAY = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def direct_file(path: Path) -> Iterator[pa.NativeFile]:
    """Makes a file to be written; all of it is on the disk when the block has ended without an error.

    Raises:
        OSError: If there is one of that name already, or it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writer = _Writer(descriptor)
        with pa.PythonFile(writer, "w") as sink:
            yield sink
        writer.finish()
    finally:
        os.close(descriptor)


class _Writer:
    """What `pyarrow.PythonFile` needs of a file to be written. Not thread-safe."""

    def __init__(self, descriptor: int) -> None:
        """Writes an empty file, and never closes it."""
        self.closed = False
        self._descriptor = descriptor
        self._is_direct = _DIRECT != 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = mmap.mmap(-1, BUFFER_BYTES, flags)  # begins where a page does
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._filled = 0
        self._written = 0

    def write(self, content: pa.Buffer | bytes) -> int:
        """Takes all of `content`."""
        left = np.frombuffer(content, np.uint8)
        size = left.size
        while left.size:
            room = self._bytes[self._filled :][: left.size]
            room[:] = left[: room.size]
            left = left[room.size :]
            self._filled += room.size
            if self._filled == BUFFER_BYTES:
                self._empty_buffer()
        return size

    def close(self) -> None:
        """Takes no more; whether what came is all, only the caller of `direct_file` knows."""
        self.closed = True

    def finish(self) -> None:
        """Writes what is left, and waits until the disk has all of it."""
        self._is_direct = False  # what is left ends anywhere
        self._empty_buffer()
        os.fsync(self._descriptor)

    def _empty_buffer(self) -> None:
        left = memoryview(self._buffer)[: self._filled]
        while left:
            count = self._write_once(left)
            left = left[count:]
            self._written += count
        self._filled = 0
        if not self._is_direct and self._written % FORCE_BYTES == 0:
            os.fsync(self._descriptor)

    def _write_once(self, content: memoryview) -> int:
        """Writes as much of `content` as goes at once, and returns how much that was."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            wanted = flags | _DIRECT if self._is_direct else flags & ~_DIRECT
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
            return os.write(self._descriptor, content)
        except OSError as error:
            if not self._is_direct or error.errno not in _NO_SUCH_WAY:
                raise
            self._is_direct = False
            return self._write_once(content)
