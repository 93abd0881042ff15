"""Generic reader of text formats, on top of a scanner of blocks of lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks.batching import without_rows
from ctr_ps.ps_worker.data.blocks.reader import Block
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.line_blocks import LineNumbers, line_blocks, line_splits

_MAX_SHOWN_BYTES = 60


@dataclass(frozen=True, slots=True)
class BadLine:
    """A malformed line."""

    index: int  # number of the line in the block, from 0
    start: int  # start of the line in the block
    fault: str  # the fault, with the value


class LineScanner(Protocol):
    """Scanner of one format. Threads share it, unless a `TextReader` makes one for each pass."""

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
                lines = LineNumbers(split.path, position)
            rows, starts, bad_lines = scanner.scan(block)
            for bad in bad_lines:
                # A line number may take a pass over the file up to there, an offset is known.
                place = f"byte {position + bad.start}"
                if self._bad_rows.is_shown:
                    place = str(lines.number(bad.index))
                self._bad_rows.add(split.path, place, bad.fault)
            lines.passed += rows.size + len(bad_lines)
            if rows.size:
                yield Block(rows, position, position + starts)


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
