"""A user's own command as a reader of files: it reads a file from stdin and prints multi-slot text.

    file content --> stdin | command | stdout --> MultiSlotScanner --> rows

The output of one run over a file is one split. Offsets are lines of the output: to begin at one, the command
is run again and so many lines are passed over, so it has to print the same for the same file.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_model.schema import Schema
from protos.errors import UsageError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.reader import Block, Reader
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.formats import MakeReader
from ps_worker.data.text.multislot import MultiSlotScanner, Values
from ps_worker.data.text.text_reader import shown
from ps_worker.data.user_code.pipe_process import PipeProcess

STALL_LIMIT_S = 300.0

_BLOCK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 20
_NEWLINE = np.uint8(ord("\n"))


def piped(
    command: str,
    *,
    columns: Sequence[str] | None = None,
    values: Values = "keys",
    stall_limit_s: float = STALL_LIMIT_S,
) -> MakeReader:
    """Returns the format of files that a command turns into multi-slot text, as a dataset takes it.

    Args:
        command: For bash; a process runs for every file that is being read.
        columns: What it prints, as `MultiSlotScanner` takes it.
        values: Likewise.
        stall_limit_s: How long it may do nothing.
    """

    def make(schema: Schema, _: BadRows) -> Reader:
        scanner = MultiSlotScanner(schema, columns, values)
        return PipeReader(command, scanner, stall_limit_s=stall_limit_s)

    return make


class PipeReader:
    """Turns the output of a command into blocks of rows; a `Reader`, so thread-safe.

    A command that fails, prints a malformed line, leaves input unread or does nothing for too long ends the
    run: that is a fault of code, so no limit of malformed rows applies.
    """

    def __init__(
        self, command: str, scanner: MultiSlotScanner, *, stall_limit_s: float = STALL_LIMIT_S
    ) -> None:
        """Starts nothing yet.

        Args:
            command: For bash.
            scanner: Of what it prints.
            stall_limit_s: How long it may do nothing.

        Raises:
            UsageError: If the command is empty, or the limit is not positive.
        """
        if not command.strip():
            raise UsageError(
                f"the command is {command!r}, expected one that prints multi-slot text"
            )
        if stall_limit_s <= 0:
            raise UsageError(f"stall_limit_s is {stall_limit_s!r}, expected more than 0")
        self._command = command
        self._scanner = scanner
        self._stall_limit_s = stall_limit_s

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns the whole file: only the command knows where it could be cut."""
        return [FileSplit(path)]

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows that the command prints for a file; offsets are lines of its output.

        Raises:
            UsageError: If the split is not a whole file.
            DataError: Names the file and the command, its exit code, its last words, and the line at fault.
        """
        if split != FileSplit(split.path):
            raise UsageError(f"{split} is not a whole file, and a command reads no other")
        line = 0
        with PipeProcess(self._command, split.path, self._stall_limit_s) as process:
            for text in _line_blocks(process):
                block, begin = _without_first(text, (offset or 0) - line), max(line, offset or 0)
                line += int(np.count_nonzero(text == _NEWLINE))
                rows, bad_lines = self._scanner.scan(block)
                if bad_lines:
                    bad = bad_lines[0]
                    content = block[bad.start :].tobytes().split(b"\n", 1)[0]
                    raise process.failure(
                        f"printed a bad line {begin + bad.index + 1}, {shown(content)}: {bad.fault}"
                    )
                if rows.size:
                    yield Block(rows, begin)


def _line_blocks(process: PipeProcess) -> Iterator[NDArray[np.uint8]]:
    """Yields whole lines; a last one without an end only of a command that ended well."""
    held = bytearray()
    for chunk in process.chunks():
        held += chunk
        if len(held) >= _BLOCK_BYTES:
            end = held.rfind(b"\n") + 1
            if end:
                yield np.frombuffer(bytes(held[:end]), np.uint8)
                held = held[end:]
            elif len(held) > _MAX_LINE_BYTES:
                raise process.failure(f"printed a line longer than {_MAX_LINE_BYTES} bytes")
    if held and not held.endswith(b"\n"):
        held += b"\n"
    if held:
        yield np.frombuffer(bytes(held), np.uint8)


def _without_first(text: NDArray[np.uint8], num_lines: int) -> NDArray[np.uint8]:
    """Returns lines without the first ones, which may be more than there are."""
    if num_lines <= 0:
        return text
    ends = np.flatnonzero(text == _NEWLINE) + 1
    return text[ends[min(num_lines, len(ends)) - 1] :]
