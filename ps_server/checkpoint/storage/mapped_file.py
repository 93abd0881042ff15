"""A file that is mapped into memory, with a check for changes."""

import os
from pathlib import Path
from typing import NamedTuple, Self

import pyarrow as pa

from ctr_ps.protos.errors import CheckpointError


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
                f"{self._path} was changed while it was mapped, from {self._first.size} bytes to {now.size}: "
                f"write a new checkpoint instead of overwriting its files, or do not map it"
            )
