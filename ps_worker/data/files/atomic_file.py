"""Atomic file writes: a file gets its name once it is complete; compressed according to the suffix."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

import pyarrow as pa


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file for writing; renames it to `path` at the end, or removes it on an error."""
    temporary = temporary_path(path)
    try:
        with open_to_write(temporary) as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename is None:  # of a write
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Returns the hidden path next to `path`, with the same suffix, for a file under construction."""
    return path.with_name(f".{path.name}")


def open_to_write(path: Path) -> BinaryIO:
    """Opens a file for writing; .gz and .zst are compressed, reproducibly."""
    if path.suffix.lower() == ".gz":
        return cast("BinaryIO", _Gzip(path))
    if path.suffix.lower() == ".zst":
        return cast("BinaryIO", pa.output_stream(str(path), compression="zstd"))
    return path.open("wb")


class _Gzip(gzip.GzipFile):
    """A gzip file without name and time in its header; closing it closes the underlying file."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        super().__init__(filename="", mode="wb", compresslevel=6, fileobj=self._file, mtime=0)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()
