r"""Text files as blocks of whole lines, from any line on, and a reader of formats with a scanner of blocks.

A split contains the lines that begin in it, so adjacent splits contain every line once:

    bytes   aaaa\nbbbbbbb\ncc\ndddd\n
    splits   |------|-----|----------|      aaaa bbbbbbb | - | cc dddd
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, without_rows
from ctr_ps.ps_worker.data.files.content import (
    Content,
    Stream,
    is_compressed,
    open_content,
)
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.files.listing import size_of

BLOCK_BYTES = 1 << 20

_NEWLINE = np.uint8(ord("\n"))
_MAX_SHOWN_BYTES = 60


@dataclass(frozen=True, slots=True)
class BadLine:
    """A malformed line."""

    index: int  # in the block, from 0
    start: int  # in the block
    fault: str  # with the value


class LineScanner(Protocol):
    """Scanner of one format. Threads share it."""

    def scan(self, block: NDArray[np.uint8]) -> tuple[Batch, NDArray[np.int64], Sequence[BadLine]]:
        """Scans a block of whole lines: rows, starts of their lines int64[n], and malformed lines."""
        ...


class TextReader:
    """A `Reader` of a format with a `LineScanner`. Thread-safe."""

    def __init__(self, scanner: LineScanner, bad_rows: BadRows) -> None:
        self._scanner = scanner
        self._bad_rows = bad_rows

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Splits a file by bytes unless it is compressed; see `Reader.splits`."""
        return line_splits(path, num_splits)

    def scanner_of(self, split: FileSplit, block: NDArray[np.uint8], position: int) -> LineScanner:
        """Returns the scanner of a split, whose first block is at `position` in the content."""
        return self._scanner

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows of a split; offsets are in bytes of the content. See `Reader.blocks`."""
        scanner: LineScanner | None = None
        for block, position in line_blocks(split, offset):
            if scanner is None:
                scanner = self.scanner_of(split, block, position)
            rows, starts, bad_lines = scanner.scan(block)
            for bad in bad_lines:
                place = partial(line_number, split.path, position + bad.start)
                self._bad_rows.add(split.path, place, bad.fault)
            if rows.size:
                yield Block(rows, position, position + starts)


def line_splits(path: str, num_splits: int) -> list[FileSplit]:
    """Splits a text file into at most `num_splits` ranges of equal size, a compressed one into one."""
    size = size_of(path)
    num_splits = 1 if is_compressed(path) else max(1, min(num_splits, size))
    starts = [size * number // num_splits for number in range(num_splits)]
    return [
        FileSplit(path, start, stop)
        for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


def line_blocks(
    split: FileSplit, offset: int | None = None, block_bytes: int = BLOCK_BYTES
) -> Generator[tuple[NDArray[np.uint8], int], None, None]:
    r"""Yields the lines of a split as blocks uint8[n], with their offsets in the content.

    Each block ends with b"\n", which the last line may lack, and is overwritten by the next one. `offset` is
    the start of a line of the split, to resume from; `block_bytes` is also the limit of a line. Raises a
    DataError that names the file, if it cannot be read, is damaged or has too long a line.
    """
    # The byte before the split decides whether a line begins at its start.
    begin = max(split.start - 1, 0) if offset is None else offset
    with open_content(split.path, begin) as stream:
        for block, position in _blocks(stream, begin, split.path, block_bytes):
            if offset is None and position < split.start:
                head = _line_stop(block, 0)
                block, position = block[head:], position + head  # noqa: PLW2901
            if split.stop is not None and position + len(block) >= split.stop:
                if position < split.stop:
                    yield block[: _line_stop(block, split.stop - 1 - position)], position
                return
            if len(block):
                yield block, position


def first_block(path: str) -> NDArray[np.uint8]:
    """Returns the first whole lines of a file, uint8[n], empty of an empty one; errors as `line_blocks`."""
    with closing(line_blocks(FileSplit(path))) as blocks:
        block, _ = next(blocks, (np.empty(0, np.uint8), 0))
        return block


def lines_before(path: str, offset: int) -> int:
    """Returns the number of lines before `offset`, the start of a line; DataError if unreadable."""
    if offset == 0:
        return 0
    before = line_blocks(FileSplit(path, 0, offset))
    return sum(int(np.count_nonzero(block == _NEWLINE)) for block, _ in before)


def line_number(path: str, offset: int) -> str:
    """Returns the number of the line at `offset`, from 1, or where its message is in a stream."""
    return path.place(offset) if isinstance(path, Content) else str(lines_before(path, offset) + 1)


def without_overflows(
    schema: Schema,
    numbers: NDArray[np.float64],
    rows: Batch,
    starts: NDArray[np.int64],
    bad_lines: list[BadLine],
) -> tuple[Batch, NDArray[np.int64], list[BadLine]]:
    """Moves rows with numbers beyond float32 from a scanner's result to its malformed lines.

    `numbers` are float64[n, num_dense], unscaled; `starts` int64[n] those of the rows' lines; `bad_lines`
    ascending.
    """
    faults = schema.overflows(numbers, rows.dense)
    if not faults:
        return rows, starts, bad_lines
    bad_before = np.searchsorted([line.start for line in bad_lines], starts)
    beyond = [
        BadLine(row + int(bad_before[row]), int(starts[row]), fault)
        for row, fault in faults.items()
    ]
    bad_lines = sorted([*bad_lines, *beyond], key=lambda line: line.index)
    return *without_rows(rows, starts, faults), bad_lines


def shown(text: bytes) -> str:
    """Returns text for a message: escaped and truncated."""
    rest = "..." if len(text) > _MAX_SHOWN_BYTES else ""
    return repr(text[:_MAX_SHOWN_BYTES].decode(errors="backslashreplace")) + rest


def _blocks(
    stream: Stream, position: int, path: str, block_bytes: int
) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yields whole lines and their position; `position` is that of the stream.

    A block has as many lines as fit, however the stream is chunked: so blocks are the same in every pass.
    """
    buffer = bytearray(block_bytes)
    memory, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
    held = 0  # bytes of an incomplete line, at the start of the buffer
    while count := _read_full(stream, memory[held:]):
        filled = held + count
        end = buffer.rfind(b"\n", held, filled) + 1
        if end:
            yield array[:end], position
        elif filled == block_bytes:
            raise DataError(
                f"{path}: the line at byte {position} is longer than {block_bytes} bytes"
            )
        position += end
        held = filled - end
        memory[:held] = memory[end:filled]
    if held:
        buffer[held] = _NEWLINE
        yield array[: held + 1], position


def _read_full(stream: Stream, memory: memoryview) -> int:
    """Fills `memory` up to the end of the stream; returns the number of bytes read."""
    filled = 0
    while filled < len(memory) and (count := stream.readinto(memory[filled:])):
        filled += count
    return filled


def _line_stop(block: NDArray[np.uint8], position: int) -> int:
    """Returns the end, after the newline, of the line that contains `position`."""
    return position + int(np.argmax(block[position:] == _NEWLINE)) + 1
