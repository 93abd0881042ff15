"""A shell command with a file as stdin, whose output is read in bounded memory; every wait has a limit.

    file --thread--> stdin | command | stdout --> caller
                                     | stderr --thread--> last lines, for errors

The command runs in a process group of its own, which is always killed at the end.
"""

import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import IO, Self, cast

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.content import open_content
from ctr_ps.ps_worker.data.user_code.salted_hash import is_salted

_SECRETS = ("CTR_PS_TOKEN", "CTR_PS_TLS_")  # a parser of text calls no server

_CHUNK_BYTES = 1 << 16
_STDERR_LINES = 20
_STDERR_BYTES = 1 << 14
_JOIN_LIMIT_S = 10.0

_SIGNALS = {int(each): each.name for each in signal.Signals}  # without real-time signals


class PipeProcess:
    """One run of a command over one file; a context manager. For one thread."""

    def __init__(self, command: str, path: str, stall_limit_s: float) -> None:
        """Starts the command.

        Its environment is that of this process without its token and certificates. Python's `hash()` of text
        is not salted in it, so that keys are the same in all processes.

        Args:
            command: For bash, with pipefail, so that a failure anywhere in a pipeline is reported.
            path: File whose decompressed content is its stdin.
            stall_limit_s: The longest time without reading, printing or ending.

        Raises:
            DataError: If the command cannot be started.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._close()

    def chunks(self) -> Iterator[bytes]:
        """Yields the output of the command until it has succeeded.

        Raises:
            DataError: If the command failed, stalled or left input unread, or the file cannot be read.
        """
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
                f"closed its output, but did not end for {self._stall_limit_s:g} s"
            ) from error
        has_unread = exit_code == 0 and self._has_unread()
        if self._feed_error is not None:
            raise self._feed_error
        if exit_code:
            raise self.failure("failed")
        if has_unread:
            raise self.failure("did not read all of its input")

    def _has_unread(self) -> bool:
        """Whether a command that has ended left input unread."""
        self._wait_for(self._unread)
        return os.read(self._unread, 1) != b""

    def _wait_for(self, pipe: int) -> None:
        """Waits until a pipe is readable or closed."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        num_fed = self._num_fed
        while not poll.poll(self._stall_limit_s * 1000):
            if self._num_fed == num_fed:
                raise self.failure(f"did nothing for {self._stall_limit_s:g} s")
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
