"""A file that is mapped into memory, and whether it was changed since."""

import mmap
import os
import weakref
from pathlib import Path
from typing import Self

import pyarrow as pa

from protos.errors import CheckpointError


class Mapped:
    """The bytes of a file, without a copy where it is mapped; changes of the file show then.

    Attributes:
        content: The bytes.
    """

    def __init__(self, content: pa.Buffer) -> None:
        """Takes bytes that nobody changes; `of_file` maps a file."""
        self.content = content
        self._path, self._descriptor = Path(), -1
        self._first = (content.size, 0)

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Maps a file, which must not be empty.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is empty.
        """
        descriptor = os.open(path, os.O_RDONLY)
        try:
            first = os.fstat(descriptor)
            mapped = cls(pa.py_buffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)))
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(mapped, os.close, descriptor)
        mapped._path, mapped._descriptor = path, descriptor
        mapped._first = (first.st_size, first.st_mtime_ns)
        return mapped

    def require_unchanged(self) -> None:
        """Checks that the file is as it was when it was mapped; that it was removed does not count.

        Raises:
            CheckpointError: If its size or the time of its last change is another one.
        """
        if (now := self._state()) != self._first:
            raise CheckpointError(
                f"{self._path} was changed while it was mapped, from {self._first[0]} bytes to {now[0]}: "
                f"write checkpoints anew instead of overwriting their files, or do not map them"
            )

    def _state(self) -> tuple[int, int]:
        if self._descriptor < 0:
            return self._first
        try:
            found = os.fstat(self._descriptor)
        except OSError as error:  # of a network file system
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error
        return found.st_size, found.st_mtime_ns
