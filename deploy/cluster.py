"""Runs the processes of a cluster on this machine and leaves none of them behind.

What ends the processes when the launcher ends:
    it returns, fails, or gets a signal it can catch    `stop`: SIGTERM, after a grace SIGKILL
    it is killed (SIGKILL, out of memory)               the kernel, see `deploy.tether`

Each process leads a process group of its own, so a Ctrl-C in the terminal reaches the launcher alone,
which then ends all in order. One thread a process waits for its end and reports it to a queue; signals
come through the same queue, so the main thread waits for one thing and nothing polls.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from deploy import tether
from deploy.plan import ProcessSpec, describe_end, environment_of, exit_code_of

log = logging.getLogger("ps-launch")


@dataclass(frozen=True, slots=True)
class Exited:
    """A process has ended with what `Popen.returncode` says."""

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher was asked to end."""

    number: int


Events = queue.SimpleQueue[Exited | Signalled]  # its `put` may be called in a signal handler


@dataclass(frozen=True, slots=True)
class Terminal:
    """File descriptors that a process's output is copied to while it runs."""

    stdout: int
    stderr: int


class ClusterError(Exception):
    """Why a cluster is ended before its time, and with which exit code."""

    exit_code = 1
    log_path: Path | None = None


class ProcessFailedError(ClusterError):
    """A process ended otherwise than with exit code 0; those in `early` had ended well before it."""

    def __init__(
        self, name: str, returncode: int, log_path: Path, early: Sequence[str] = ()
    ) -> None:
        before = f", after {', '.join(early)} had ended with code 0" if early else ""
        super().__init__(f"{name} {describe_end(returncode)}{before}")
        self.exit_code = exit_code_of(returncode)
        self.log_path = log_path


class SignalledError(ClusterError):
    """The launcher was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"got {signal.Signals(number).name}")
        self.exit_code = exit_code_of(-number)


class StillRunningError(ClusterError):
    """Processes that should have ended by themselves have not."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        super().__init__(f"{', '.join(names)} did not end within {seconds:g} s")


class LocalCluster:
    """The running processes and their logs; leaving the `with` block ends them.

    To be used from the main thread only: the kernel's tether is tied to the thread that starts a
    process, and signals are handled there.
    """

    def __init__(
        self,
        log_dir: Path,
        events: Events,
        *,
        grace_seconds: float = 10.0,
        notice_seconds: float = 10.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            log_dir: Folder of the log files.
            events: Where the signals of this process go.
            grace_seconds: Time between SIGTERM and SIGKILL.
            notice_seconds: How long processes may outlive those that they need before this is said.
        """
        self._log_dir = log_dir
        self._events = events
        self._grace_seconds = grace_seconds
        self._notice_seconds = notice_seconds
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._copies: list[threading.Thread] = []
        self._logs = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec, terminal: Terminal | None = None) -> None:
        """Starts a process that writes to its log, and to `terminal` too where one is given."""
        log = self._logs.enter_context(self.log_path(spec.name).open("wb", buffering=0))
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *spec.command),
            env=environment_of(spec, dict(os.environ)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if terminal else log,
            stderr=subprocess.PIPE if terminal else log,
            process_group=0,
        )
        self._running[spec.name] = process
        threading.Thread(target=self._report_end, args=(spec.name, process), daemon=True).start()
        if terminal and process.stdout and process.stderr:
            self._copy(process.stdout, log, terminal.stdout)
            self._copy(process.stderr, log, terminal.stderr)

    def wait_for(self, names: Collection[str], timeout_seconds: float = math.inf) -> None:
        """Returns when the named processes have ended with exit code 0.

        That others end before them, with 0, is no failure: servers end when their workers are done. But
        it is said when the named ones go on for long, as they may wait for what is no longer there.

        Raises:
            ProcessFailedError: as soon as any process of the cluster fails, named or not.
            SignalledError: when the launcher is to end.
            StillRunningError: when `timeout_seconds` have passed.
        """
        deadline, notice_at = time.monotonic() + timeout_seconds, math.inf
        early: list[str] = []
        while waiting := [name for name in names if name in self._running]:
            match self._next_event(min(deadline, notice_at)):
                case Exited(name, returncode):
                    del self._running[name]
                    if returncode != 0:
                        raise ProcessFailedError(name, returncode, self.log_path(name), early)
                    if name not in names:
                        early.append(name)
                        notice_at = time.monotonic() + self._notice_seconds
                case Signalled(number):
                    raise SignalledError(number)
                case None if time.monotonic() >= deadline:
                    raise StillRunningError(waiting, timeout_seconds)
                case None:
                    notice_at = math.inf
                    self._say_early(early, waiting)

    def stop(self) -> None:
        """Ends what still runs; a signal that comes meanwhile cuts the grace short."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):  # ended, not yet reported
                    os.killpg(process.pid, number)
            self._take_ends(time.monotonic() + self._grace_seconds)
        for copy in self._copies:
            copy.join(self._grace_seconds)
        self._logs.close()

    def log_path(self, name: str) -> Path:
        """Returns the file that a process's stdout and stderr go to."""
        return self._log_dir / f"{name}.log"

    def _say_early(self, early: Sequence[str], waiting: Sequence[str]) -> None:
        log.warning(
            "%s ended %g s ago with code 0, but %s still %s. Servers end when all workers are done: did "
            "they serve at all? A script calls fleet.run_server() where fleet.is_server()",
            ", ".join(early),
            self._notice_seconds,
            ", ".join(waiting),
            "runs" if len(waiting) == 1 else "run",
        )

    def _take_ends(self, deadline: float) -> None:
        while self._running:
            event = self._next_event(deadline)
            if not isinstance(event, Exited):
                return
            del self._running[event.name]

    def _next_event(self, deadline: float) -> Exited | Signalled | None:
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _copy(self, source: IO[bytes], log: IO[bytes], shown: int) -> None:
        copy = threading.Thread(target=_copy, args=(source, [log.fileno(), shown]), daemon=True)
        copy.start()
        self._copies.append(copy)

    def _report_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._events.put(Exited(name, process.wait()))


@contextlib.contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    """Turns the signals that ask a program to end into events; those ignored (`nohup`) stay so."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {
        number: signal.signal(number, lambda number, _: events.put(Signalled(number)))
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _copy(source: IO[bytes], sinks: list[int]) -> None:
    """Copies `source` to its end; a sink that fails is left out, so the process is never held up."""
    with source:
        while chunk := os.read(source.fileno(), 1 << 16):
            for sink in list(sinks):
                try:
                    _write_all(sink, chunk)
                except OSError:  # a closed pipe, a full disk
                    sinks.remove(sink)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
