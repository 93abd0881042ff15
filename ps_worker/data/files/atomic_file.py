"""Files that take their names only when they are whole, compressed if the name's end asks for it."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

import pyarrow as pa


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Lends a file to write to; it gets its name at the end, and is gone if that is not reached."""
    hidden = temporary_path(path)
    try:
        with open_to_write(hidden) as file:
            yield file
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Returns where a file is written until it is whole: next to it, with the same end of the name."""
    return path.with_name(f".{path.name}")


def open_to_write(path: Path) -> BinaryIO:
    """Opens a file to write to; .gz and .zst are compressed, the same content to the same bytes."""
    if path.suffix == ".gz":
        # The time of writing and the name would be part of the bytes.
        return cast("BinaryIO", _Gzip(path))
    if path.suffix == ".zst":
        return cast("BinaryIO", pa.output_stream(str(path), compression="zstd"))
    return path.open("wb")


class _Gzip(gzip.GzipFile):
    """A gzip file without name and time; closing it closes the file below."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        super().__init__(filename="", mode="wb", compresslevel=6, fileobj=self._file, mtime=0)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()
