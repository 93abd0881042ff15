"""The content of files as a stream of bytes: as it is, or decompressed as the name's end asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Protocol

import pyarrow as pa

from protos.errors import DataError
from ps_worker.data.files.listing import file_errors, open_file

CODECS = {".gz": "gzip", ".zst": "zstd"}

_OTHER_CODECS = (".bz2", ".xz", ".lz4", ".lzo", ".snappy", ".br", ".Z", ".zip")
_SKIP_BYTES = 1 << 18
_DAMAGE = ("zlib inflate failed", "ZSTD decompress failed")  # how Arrow's messages begin


class Stream(Protocol):
    """Bytes in their order."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fills `buffer` from its start; returns how many bytes it wrote, 0 at the end."""
        ...


def is_compressed(path: str) -> bool:
    """Whether the content can be read from its start only."""
    return PurePath(path).suffix in CODECS


@contextmanager
def open_content(path: str, offset: int = 0) -> Iterator[Stream]:
    """Lends the content of a file, decompressed if the name ends in .gz or .zst.

    Args:
        path: Local path or URL.
        offset: Bytes of the content to leave out. Compressed content has to be decompressed up to there.

    Raises:
        DataError: Names the file, if it cannot be read, is damaged or is compressed in another way; also
            what is raised while it is lent.
    """
    suffix = PurePath(path).suffix
    if (
        suffix in _OTHER_CODECS
    ):  # its bytes have few lines, which might pass for some malformed rows
        raise DataError(
            f"{path}: {suffix} files are not read: decompress it, or compress it to .gz or .zst"
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
def _damage_named(path: str, codec: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = str(error)
        if message.startswith("Truncated compressed stream"):
            raise DataError(f"{path}: the file is cut off; copy or compress it again") from error
        if message.startswith(_DAMAGE):
            raise DataError(f"{path}: not a sound {codec} file ({message})") from error
        raise


def _skip(stream: Stream, num_bytes: int) -> None:
    waste = memoryview(bytearray(_SKIP_BYTES))
    while num_bytes and (count := stream.readinto(waste[: min(num_bytes, _SKIP_BYTES)])):
        num_bytes -= count
