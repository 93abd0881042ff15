"""Reader that pipes files through a user's command, which prints multi-slot text.

    file content --> stdin | command | stdout --> MultiSlotScanner --> rows

A file is one split. Offsets are lines of the output: resuming runs the command again and skips that number of
lines, so its output must be deterministic.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, Reader
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import MakeReader
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner, Values
from ctr_ps.ps_worker.data.text.text_reader import shown
from ctr_ps.ps_worker.data.user_code.pipe_process import PipeProcess

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
    """Returns a format for datasets that pipes files through a command.

    Args:
        command: For bash, which runs it once per file.
        columns: Order of the columns in its output, see `MultiSlotScanner`.
        values: Whether it prints keys or text, see `MultiSlotScanner`.
        stall_limit_s: The longest time without reading, printing or ending.
    """

    def make(schema: Schema, _: BadRows) -> Reader:
        scanner = MultiSlotScanner(schema, columns, values)
        return PipeReader(command, scanner, stall_limit_s=stall_limit_s)

    return make


class PipeReader:
    """A `Reader` of the output of a command. Thread-safe.

    A command that fails, prints a malformed line, leaves input unread or stalls is an error: a fault of code,
    to which no limit of malformed rows applies.

    Attributes:
        slot_values: What the values of slots are.
    """

    def __init__(
        self, command: str, scanner: MultiSlotScanner, *, stall_limit_s: float = STALL_LIMIT_S
    ) -> None:
        """Takes the command.

        Args:
            command: For bash.
            scanner: Of its output.
            stall_limit_s: The longest time without reading, printing or ending.

        Raises:
            UsageError: If the command is empty, or the limit is not positive.
        """
        if not command.strip():
            raise UsageError(
                f"the command is {command!r}, expected a command that prints multi-slot text"
            )
        if stall_limit_s <= 0:
            raise UsageError(f"stall_limit_s is {stall_limit_s!r}, expected more than 0")
        self.slot_values = scanner.slot_values
        self._command = command
        self._scanner = scanner
        self._stall_limit_s = stall_limit_s

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns the whole file, because the format of its content is unknown."""
        return [FileSplit(path)]

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows that the command prints for a file; offsets are lines of its output.

        Raises:
            UsageError: If the split is not a whole file.
            DataError: Names the file, the command, its exit code, the end of its stderr, and the malformed
                line.
        """
        if split != FileSplit(split.path):
            raise UsageError(f"{split} is not a whole file, and a command only reads whole files")
        line = 0
        with PipeProcess(self._command, split.path, self._stall_limit_s) as process:
            for text in _line_blocks(process):
                block, begin = _skip_lines(text, (offset or 0) - line), max(line, offset or 0)
                line += int(np.count_nonzero(text == _NEWLINE))
                rows, _, bad_lines = self._scanner.scan(block)
                if bad_lines:
                    bad = bad_lines[0]
                    content = block[bad.start :].tobytes().split(b"\n", 1)[0]
                    raise process.failure(
                        f"printed a bad line {begin + bad.index + 1}, {shown(content)}: {bad.fault}"
                    )
                if rows.size:
                    yield Block(rows, begin)


def _line_blocks(process: PipeProcess) -> Iterator[NDArray[np.uint8]]:
    """Yields whole lines; an unterminated last line only after the command has succeeded."""
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


def _skip_lines(text: NDArray[np.uint8], num_lines: int) -> NDArray[np.uint8]:
    """Returns text without its first lines; empty if it has fewer."""
    if num_lines <= 0:
        return text
    ends = np.flatnonzero(text == _NEWLINE) + 1
    return text[ends[min(num_lines, len(ends)) - 1] :]
