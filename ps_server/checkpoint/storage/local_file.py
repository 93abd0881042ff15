"""Local files: written with O_DIRECT, past the page cache, and mapped with a check for changes.

    write --copied--> buffer --when full--> disk

A checkpoint is not read soon, so its pages would only evict others. Writing 880 MB through the page cache
took 0.3 to 2.4 s of processor time, past it 0.05 s. File systems without O_DIRECT get the same writes through
the page cache, with regular fsyncs.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from ctr_ps.protos.errors import CheckpointError

BUFFER_BYTES = 4 * 2**20  # bytes per write; a multiple of any disk's block size, as O_DIRECT needs

FORCE_BYTES = 64 * 2**20
"""Bytes between fsyncs without O_DIRECT: the kernel on its own starts to write only after seconds.

A multiple of `BUFFER_BYTES`.
"""

_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def direct_file(path: Path) -> Iterator[pa.NativeFile]:
    """Creates a file for writing, durable when the block ends without an error; raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writer = _Writer(descriptor)
        with pa.PythonFile(writer, "w") as sink:
            yield sink
        writer.finish()
    finally:
        os.close(descriptor)


class _Writer:
    """A writable file for `pyarrow.PythonFile`, to the open descriptor of an empty file. Not thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self.closed = False
        self._descriptor = descriptor
        self._is_direct = _DIRECT != 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._buffer = mmap.mmap(-1, BUFFER_BYTES, flags)  # page-aligned, as O_DIRECT needs
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._filled = 0
        self._written = 0

    def write(self, content: pa.Buffer | bytes) -> int:
        left = np.frombuffer(content, np.uint8)
        size = left.size
        while left.size:
            room = self._bytes[self._filled :][: left.size]
            room[:] = left[: room.size]
            left = left[room.size :]
            self._filled += room.size
            if self._filled == BUFFER_BYTES:
                self._flush_buffer()
        return size

    def close(self) -> None:
        """Accepts no more; `direct_file` calls `finish` only without an error."""
        self.closed = True

    def finish(self) -> None:
        self._is_direct = False  # the rest is not a multiple of the block size
        self._flush_buffer()
        os.fsync(self._descriptor)

    def _flush_buffer(self) -> None:
        left = memoryview(self._buffer)[: self._filled]
        while left:
            count = self._write_once(left)
            left = left[count:]
            self._written += count
        self._filled = 0
        if not self._is_direct and self._written % FORCE_BYTES == 0:
            os.fsync(self._descriptor)

    def _write_once(self, content: memoryview) -> int:
        """Writes `content` with one call, perhaps only in part; returns the number of bytes written."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            wanted = flags | _DIRECT if self._is_direct else flags & ~_DIRECT
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
            return os.write(self._descriptor, content)
        except OSError as error:
            if not self._is_direct or error.errno not in _NOT_SUPPORTED:
                raise
            self._is_direct = False
            return self._write_once(content)


class _State(NamedTuple):
    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, path: str) -> Self:
        found = os.stat(path)  # noqa: PTH116 - asked twice a look-up, and a Path takes longer
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class Mapped:
    """The bytes of a file, without a copy where it is mapped; later changes of the file show.

    It keeps no descriptor: a model may have thousands of files.
    """

    def __init__(self, content: pa.Buffer) -> None:
        self.content = content
        self._path = ""
        self._first: _State | None = None

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Maps a file; raises OSError if it cannot be read, ValueError if it is empty."""
        first = _State.of(str(path))
        if not first.size:
            raise ValueError(f"{path} is empty")
        with pa.memory_map(str(path)) as source:
            mapped = cls(source.read_buffer())
        mapped._path, mapped._first = str(path), first
        return mapped

    def require_unchanged(self) -> None:
        """Raises CheckpointError if the file has another size or time of change; a removal does not count."""
        if self._first is None:
            return
        try:
            now = _State.of(self._path)
        except FileNotFoundError:
            return
        except OSError as error:  # of a network file system
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error
        if now != self._first and now[:2] == self._first[:2]:
            raise CheckpointError(
                f"{self._path} was changed while it was mapped, from {self._first.size} bytes to "
                f"{now.size}: write new checkpoints instead of overwriting files, or do not map them"
            )
