"""Processes of a cluster on this machine, none of which outlives the launcher.

    launcher returns, fails or gets a signal    `stop`: SIGTERM, then SIGKILL after a grace period
    launcher is killed (SIGKILL, OOM)           the kernel kills them, see `deploy.tether`

Each process leads its own process group, so Ctrl-C in the terminal reaches only the launcher, which then
stops all in order. A thread per process waits for its exit and reports it to a queue; signals go to the same
queue, so the main thread waits on one queue without polling.
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
    """A process exited; `returncode` is that of `Popen`."""

    name: str
    returncode: int


@dataclass(frozen=True, slots=True)
class Signalled:
    """The launcher received a signal to stop."""

    number: int


Events = queue.SimpleQueue[Exited | Signalled]  # `put` is safe in a signal handler


@dataclass(frozen=True, slots=True)
class Terminal:
    """File descriptors to which a process's output is copied."""

    stdout: int
    stderr: int


class ClusterError(Exception):
    """Reason to stop a cluster early, with an exit code."""

    exit_code = 1
    log_path: Path | None = None


class ProcessFailedError(ClusterError):
    """A process failed; those in `early` had exited with code 0 before it."""

    def __init__(
        self, name: str, returncode: int, log_path: Path, early: Sequence[str] = ()
    ) -> None:
        before = f", after {', '.join(early)} had exited with code 0" if early else ""
        super().__init__(f"{name} {describe_end(returncode)}{before}")
        self.exit_code = exit_code_of(returncode)
        self.log_path = log_path


class SignalledError(ClusterError):
    """The launcher received a signal to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"got {signal.Signals(number).name}")
        self.exit_code = exit_code_of(-number)


class StillRunningError(ClusterError):
    """Processes did not exit in time."""

    def __init__(self, names: Sequence[str], seconds: float) -> None:
        super().__init__(f"{', '.join(names)} did not exit within {seconds:g} s")


class LocalCluster:
    """Running processes and their logs; leaving the `with` block stops them.

    Use it from the main thread only: the kernel ties a process to the thread that started it, and signals
    are handled there.
    """

    def __init__(
        self,
        log_dir: Path,
        events: Events,
        *,
        grace_seconds: float = 10.0,
        notice_seconds: float = 10.0,
    ) -> None:
        """Starts no process.

        Args:
            log_dir: Folder of the log files.
            events: Queue that also receives the signals of this process.
            grace_seconds: Time between SIGTERM and SIGKILL.
            notice_seconds: Time after the exit of other processes until a warning that some still run.
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
        """Starts a process whose output goes to its log, and to `terminal` if given."""
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
        threading.Thread(target=self._report_exit, args=(spec.name, process), daemon=True).start()
        if terminal and process.stdout and process.stderr:
            self._copy(process.stdout, log, terminal.stdout)
            self._copy(process.stderr, log, terminal.stderr)

    def wait_for(self, names: Collection[str], timeout_seconds: float = math.inf) -> None:
        """Waits until the named processes have exited with code 0.

        Others may exit before them with code 0, as servers do when their workers are done. If the named ones
        then run for long, a warning is logged, as they may wait for servers that are gone.

        Raises:
            ProcessFailedError: When any process of the cluster fails, named or not.
            SignalledError: When the launcher receives a signal.
            StillRunningError: After `timeout_seconds`.
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
                    self._warn_early(early, waiting)

    @property
    def running(self) -> list[str]:
        """Names of the processes that have not exited."""
        return list(self._running)

    def stop(self) -> None:
        """Stops all running processes; a signal during the grace period ends it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):  # exited, not yet reported
                    os.killpg(process.pid, number)
            self._collect_exits(time.monotonic() + self._grace_seconds)
        for copy in self._copies:
            copy.join(self._grace_seconds)
        self._logs.close()

    def log_path(self, name: str) -> Path:
        """Returns the log file of a process's stdout and stderr."""
        return self._log_dir / f"{name}.log"

    def _warn_early(self, early: Sequence[str], waiting: Sequence[str]) -> None:
        log.warning(
            "%s exited %g s ago with code 0, but %s still %s. Servers exit when all workers have left: did "
            "they serve at all? A script calls fleet.run_server() if fleet.is_server()",
            ", ".join(early),
            self._notice_seconds,
            ", ".join(waiting),
            "runs" if len(waiting) == 1 else "run",
        )

    def _collect_exits(self, deadline: float) -> None:
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

    def _report_exit(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._events.put(Exited(name, process.wait()))


@contextlib.contextmanager
def signals_as_events(events: Events) -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into events; those ignored (`nohup`) stay ignored."""
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
    """Copies `source` to its end; sinks that fail are dropped, so that the process is never blocked."""
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
