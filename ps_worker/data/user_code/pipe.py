"""Reader that pipes files through a user's command, which prints multi-slot text; every wait has a limit.

    file --thread--> stdin | command | stdout --> MultiSlotScanner --> rows
                                     | stderr --thread--> last lines, for errors

A file is one split. Offsets are lines of the output: resuming runs the command again and skips that number of
lines, so its output must be deterministic.
"""

import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, Reader
from ctr_ps.ps_worker.data.files.content import open_content
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import MakeReader
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner, Values
from ctr_ps.ps_worker.data.text.text_reader import shown
from ctr_ps.ps_worker.data.user_code.salted_hash import is_salted

STALL_LIMIT_S = 300.0

_BLOCK_BYTES = 1 << 18
_MAX_LINE_BYTES = 1 << 20
_NEWLINE = np.uint8(ord("\n"))

_SECRETS = ("CTR_PS_TOKEN", "CTR_PS_TLS_")  # a parser of text calls no server

_CHUNK_BYTES = 1 << 16
_STDERR_LINES = 20
_STDERR_BYTES = 1 << 14
_JOIN_LIMIT_S = 10.0

_SIGNALS = {int(each): each.name for each in signal.Signals}  # without real-time signals


def piped(
    command: str, *, columns: Sequence[str] | None = None, values: Values = "keys"
) -> MakeReader:
    """Returns a format for datasets that pipes files through a command.

    Arguments are those of `PipeReader` and of the `MultiSlotScanner` of its output.
    """

    def make(schema: Schema, _: BadRows) -> Reader:
        scanner = MultiSlotScanner(schema, columns, values)
        return PipeReader(command, scanner)

    return make


class PipeReader:
    """A `Reader` of the output of a command. Thread-safe.

    A command that fails, prints a malformed line, leaves input unread or stalls is an error: a fault of code,
    to which no limit of malformed rows applies.
    """

    def __init__(
        self, command: str, scanner: MultiSlotScanner, *, stall_limit_s: float = STALL_LIMIT_S
    ) -> None:
        """Takes a command for bash, which runs it once per file, and the scanner of its output.

        `stall_limit_s`, above 0, is the longest time without reading, printing or ending. Raises UsageError
        if the command is empty.
        """
        if not command.strip():
            raise UsageError(
                f"the command is {command!r}, expected a command that prints multi-slot text"
            )
        self.slot_values = scanner.slot_values
        self._command = command
        self._scanner = scanner
        self._stall_limit_s = stall_limit_s

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        """Returns the whole file, because the format of its content is unknown."""
        return [FileSplit(path)]

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        """Yields the rows that the command prints for a whole file; offsets are lines of its output.

        A DataError names the file, the command, its exit code, the end of its stderr, and the malformed line.
        """
        if split != FileSplit(split.path):
            raise UsageError(f"{split} is a part of a file, but a command reads only whole files")
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


def _line_blocks(process: "PipeProcess") -> Iterator[NDArray[np.uint8]]:
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
    if num_lines <= 0:
        return text
    ends = np.flatnonzero(text == _NEWLINE) + 1
    return text[ends[min(num_lines, len(ends)) - 1] :]


class PipeProcess(AbstractContextManager["PipeProcess"]):
    """One run of a command over one file, in a process group that is killed at the end. For one thread."""

    def __init__(self, command: str, path: str, stall_limit_s: float) -> None:
        """Starts the command, whose stdin is the decompressed content of the file; DataError if it cannot.

        Its environment is that of this process without its token and certificates. Python's `hash()` of text
        is not salted in it, so that keys are the same in all processes. With pipefail a failure anywhere in a
        pipeline is reported.
        """
        self._command = command
        self._path = path
        self._stall_limit_s = stall_limit_s
        self._num_fed = 0
        self._feed_error: Exception | None = None
        self._is_closed = False
        self._stderr = b""
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)
        }
        if is_salted():
            variables["PYTHONHASHSEED"] = "0"
        # Kept open to detect input that the command leaves unread.
        self._unread, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command],
                stdin=self._unread,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=variables,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._unread)
            os.close(write_end)
            raise DataError(f"cannot run the command {command!r}: {error}") from error
        self._threads = [
            threading.Thread(target=self._feed, args=(write_end,), daemon=True),
            threading.Thread(target=self._keep_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._close()

    def chunks(self) -> Iterator[bytes]:
        """Yields the output until the command has succeeded; DataError if not, or the file cannot be read."""
        output = _descriptor(self._process.stdout)
        self._wait_for(output)
        while chunk := os.read(output, _CHUNK_BYTES):
            yield chunk
            self._wait_for(output)
        self._require_good_end()

    def failure(self, fault: str) -> DataError:
        """Kills the command; returns an error with the fault, the exit code and the end of stderr."""
        state = _ending(self._process.poll())
        self._close()
        lines = self._stderr.decode(errors="backslashreplace").splitlines()[-_STDERR_LINES:]
        tail = "".join(f"\n  {line}" for line in lines) or " nothing"
        return DataError(
            f"{self._path}: the command {self._command!r} {fault}; it {state}; its stderr ends with:{tail}"
        )

    def _require_good_end(self) -> None:
        try:
            exit_code = self._process.wait(self._stall_limit_s)
        except subprocess.TimeoutExpired as error:
            raise self.failure(
                f"closed its output, but did not exit within {self._stall_limit_s:g} s"
            ) from error
        has_unread = False
        if exit_code == 0:
            self._wait_for(self._unread)
            has_unread = os.read(self._unread, 1) != b""
        if self._feed_error is not None:
            raise self._feed_error
        if exit_code:
            raise self.failure("failed")
        if has_unread:
            raise self.failure("did not read all of its input")

    def _wait_for(self, pipe: int) -> None:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        num_fed = self._num_fed
        while not poll.poll(self._stall_limit_s * 1000):
            if self._num_fed == num_fed:
                raise self.failure(
                    f"printed nothing and read nothing for {self._stall_limit_s:g} s"
                )
            num_fed = self._num_fed

    def _feed(self, write_end: int) -> None:
        try:
            with open_content(self._path) as stream:
                buffer = memoryview(bytearray(_CHUNK_BYTES))
                while count := stream.readinto(buffer):
                    if not self._write(write_end, buffer[:count]):
                        return
        except Exception as error:  # raised again by `chunks`
            self._feed_error = error
        finally:
            os.close(write_end)

    def _write(self, write_end: int, data: memoryview) -> bool:
        """Returns False if the pipe was closed by all readers."""
        while data:
            try:
                count = os.write(write_end, data)
            except BrokenPipeError:
                return False
            self._num_fed += count
            data = data[count:]
        return True

    def _keep_stderr(self) -> None:
        pipe = _descriptor(self._process.stderr)
        while chunk := os.read(pipe, _CHUNK_BYTES):
            self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # Also after success, because background processes of the command may hold the pipes open.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._unread)
        for thread in self._threads:
            thread.join(_JOIN_LIMIT_S)
        for file in (self._process.stdout, self._process.stderr):
            cast("IO[bytes]", file).close()


def _descriptor(file: IO[bytes] | None) -> int:
    return cast("IO[bytes]", file).fileno()


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "was still running and was killed"
    if exit_code < 0:
        return f"was killed by {_SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
    # The exit code of a shell whose command was killed by a signal.
    if exit_code - 128 in _SIGNALS:
        return f"ended with exit code {exit_code} ({_SIGNALS[exit_code - 128]})"
    return f"ended with exit code {exit_code}"
