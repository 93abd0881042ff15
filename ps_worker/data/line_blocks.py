"""Files as blocks of whole lines, plain or gzip, at a bounded amount of memory."""

import gzip
import zlib
from collections.abc import Iterator
from io import BufferedIOBase, RawIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protos.errors import DataError

BLOCK_BYTES = 1 << 20


def line_blocks(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[NDArray[np.uint8]]:
    r"""Yields the content of `path` as blocks of whole lines, each block ending with b"\n".

    A last line without an end gets one. A file whose name ends in `.gz` is decompressed.

    Args:
        path: The file.
        block_bytes: The most that is read at once, and the longest line allowed, with its end.

    Yields:
        uint8[n]; the next block overwrites it.

    Raises:
        DataError: Names the file, if it cannot be read, is damaged or has a line too long.
    """
    buffer = bytearray(block_bytes)
    memory, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
    held = 0  # bytes, at the start of the buffer, of a line whose end is yet to come
    try:
        with _open(path) as file:
            while count := file.readinto(memory[held:block_bytes]):
                filled = held + count
                end = buffer.rfind(b"\n", held, filled) + 1
                if end:
                    yield array[:end]
                elif filled == block_bytes:
                    raise DataError(f"{path}: a line is longer than {block_bytes} bytes")
                held = filled - end
                memory[:held] = memory[end:filled]
    except EOFError as error:
        raise DataError(f"{path}: the file is cut off; copy or compress it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a sound gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if held:
        buffer[held] = ord("\n")
        yield array[: held + 1]


def _open(path: Path) -> BufferedIOBase | RawIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb", buffering=0)
