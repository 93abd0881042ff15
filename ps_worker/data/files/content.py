"""File content, compressed by the suffix: a stream to read; a new file, which gets its name once complete."""

import gzip
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, BinaryIO, Protocol, cast

import pyarrow as pa

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.listing import file_errors, open_file

CODECS = {".gz": "gzip", ".zst": "zstd"}

_OTHER_CODECS = (".bz2", ".xz", ".lz4", ".lzo", ".snappy", ".br", ".z", ".zip")
_SKIP_BYTES = 1 << 18
_DAMAGE = ("zlib inflate failed", "ZSTD decompress failed")  # how Arrow's messages begin


class Content(str):
    """A path with its content in memory: messages of a stream."""

    __slots__ = ("data", "place")
    data: bytes  # text of whole lines
    place: Callable[[int], str]  # of a line in messages, by its offset


class Stream(Protocol):
    """A readable stream of bytes."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fills `buffer` from its start; returns the number of bytes written, 0 at the end."""
        ...


def is_compressed(path: str) -> bool:
    """Whether the file is compressed, so that its content can only be read from the start."""
    return suffix_of(path) in CODECS


def suffix_of(path: str | PurePath) -> str:
    """Returns the suffix of a name in small letters, as `.gz`."""
    return PurePath(path).suffix.lower()


@contextmanager
def open_content(path: str, offset: int = 0) -> Iterator[Stream]:
    """Opens the content of a file, decompressed if the name ends in .gz or .zst, from byte `offset` on.

    A DataError, for errors inside the `with` block, too, names a file that cannot be read, is damaged or is
    compressed in another way.
    """
    if isinstance(path, Content):
        content = io.BytesIO(path.data)
        content.seek(offset)
        yield content
        return
    suffix = suffix_of(path)
    # Compressed bytes contain few newlines, so reading them might look like a few malformed rows.
    if suffix in _OTHER_CODECS:
        raise DataError(
            f"{path}: {suffix} files are not supported: decompress the file, or compress it to .gz or .zst"
        )
    codec = CODECS.get(suffix)
    with file_errors(path), _damage_named(path, codec), open_file(path) as file:
        if codec is None:
            file.seek(offset)
            yield file
        else:
            with pa.CompressedInputStream(file, codec) as stream:
                _skip(stream, offset)
                yield stream


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


def write_text(path: Path, text: str) -> None:
    """Writes a text as UTF-8 by `atomic_file`."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def errors_of_writing(path: Path) -> Iterator[None]:
    """Translates `OSError` to a `DataError` that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write to {str(path)!r}: {error.strerror or error}") from error


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


@contextmanager
def _damage_named(path: str, codec: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = str(error)
        if message.startswith("Truncated compressed stream"):
            raise DataError(f"{path}: the file is truncated; copy or compress it again") from error
        if message.startswith(_DAMAGE):
            raise DataError(f"{path}: not a valid {codec} file ({message})") from error
        raise


def _skip(stream: Stream, num_bytes: int) -> None:
    waste = memoryview(bytearray(_SKIP_BYTES))
    while num_bytes and (count := stream.readinto(waste[: min(num_bytes, _SKIP_BYTES)])):
        num_bytes -= count


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
