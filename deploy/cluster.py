"""Processes of a cluster, none of which outlives the launcher; an engine starts each of them.

    launcher returns, fails or gets a signal    `stop`: SIGTERM to workers, to servers when workers have ended
                                                or 3/4 of a grace period are over, SIGKILL at its end
    launcher is killed (SIGKILL, OOM)           the kernel kills them, see `deploy.tether`

Each process leads its own process group, so Ctrl-C in the terminal reaches only the launcher, which then
stops all in order. A thread per process waits for its exit and reports it to a queue; signals go to the same
queue, so the main thread waits on one queue without polling.
"""

import contextlib
import fcntl
import math
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from ctr_ps.deploy import tether
from ctr_ps.deploy.plan import ProcessSpec, environment_of, with_token
from ctr_ps.deploy.supervisor import Exited, Signalled

HOST = "127.0.0.1"
LAST_WORDS_S = 1.0
"""For the output of a process that has ended to be shown, before another one is started in its place."""


class Process(Protocol):
    """A process that an engine has started."""

    # where `subprocess.PIPE` was asked for
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Waits for its exit; returns the return code as `Popen` does."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to its process group, unless it has exited."""


class Engine(Protocol):
    """Where the processes of a cluster run."""

    def endpoints(self, names: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
        """Returns a free endpoint for each process that will bind one, reserved until it is started.

        It has the port of the one that is `wanted` for its name, if that is free.
        """

    def start(
        self, spec: ProcessSpec, token: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> Process:
        """Starts a process; `token` is for an environment that has no credentials."""

    def remove(self, folder: Path) -> None:
        """Removes a folder of servers, where they run."""

    def find(self, servers: Sequence[str], folder: Path, pattern: str) -> set[str]:
        """Returns the files in a folder of servers, where they run, by their paths in it."""


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process exited, which may be an earlier one of that name."""

    name: str
    process: Process
    returncode: int


Events = queue.SimpleQueue[ProcessExited | Signalled]  # `put` is safe in a signal handler
Sink = Callable[[bytes], None]
"""Takes output; raises OSError when it no longer can."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where a process's output is shown, beside its log."""

    stdout: Sink
    stderr: Sink


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine, which leads a group."""

    def send(self, number: signal.Signals) -> None:
        """See `Process`."""
        with contextlib.suppress(ProcessLookupError):  # exited, not yet reported
            os.killpg(self.pid, number)


class LocalEngine:
    """Starts processes on this machine, with endpoints at `host`. For one thread, with which they end."""

    def __init__(self, host: str = HOST) -> None:
        self._host = host
        self._ports: dict[str, socket.socket] = {}

    def endpoints(self, names: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
        """See `Engine`."""
        for port in self._ports.values():
            port.close()
        self._ports = {name: free_port(self._host, wanted.get(name, "")) for name in names}
        return [f"{self._host}:{port.getsockname()[1]}" for port in self._ports.values()]

    def start(
        self, spec: ProcessSpec, token: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> LocalProcess:
        """See `Engine`."""
        if port := self._ports.pop(spec.name, None):
            port.close()
        return LocalProcess(
            (sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *spec.command),
            env=environment_of(spec, with_token(dict(os.environ), token)),
            stdin=subprocess.DEVNULL,
            process_group=0,
            stdout=stdout,
            stderr=stderr,
        )

    def remove(self, folder: Path) -> None:
        """See `Engine`."""
        if folder.exists():
            shutil.rmtree(folder)

    def find(self, servers: Sequence[str], folder: Path, pattern: str) -> set[str]:
        """See `Engine`."""
        return {str(path.relative_to(folder)) for path in folder.glob(pattern)}


class LogDirError(Exception):
    """A folder of log files cannot be used for this run."""


@contextlib.contextmanager
def held(log_dir: Path) -> Iterator[None]:
    """Keeps a folder of log files from other launchers, which would write and remove the same files.

    Raises LogDirError if another launcher has it, or it cannot be written to.
    """
    try:
        lock = os.open(log_dir / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise LogDirError(f"cannot write to {log_dir}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise LogDirError(
                f"{log_dir} is in use by ps-launch, process {holder}: each run needs a --log-dir of its own"
            ) from None
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            raise LogDirError(f"cannot write to {log_dir}: {error.strerror}") from error
        yield
    finally:
        os.close(lock)


class Cluster(AbstractContextManager["Cluster"]):
    """Running processes and their logs; leaving the `with` block stops them.

    Use it from the main thread only: the kernel ties a process to the thread that started it, and signals
    are handled there.
    """

    def __init__(
        self,
        log_dir: Path,
        events: Events,
        *,
        engine: Engine | None = None,
        grace_seconds: float = 10.0,
    ) -> None:
        """Starts no process yet, with `engine`; `events` also receives the signals of this process.

        `grace_seconds` is the time between the first SIGTERM and SIGKILL.
        """
        self._log_dir = log_dir
        self._events = events
        self._grace_seconds = grace_seconds
        # Another user of this machine reaches loopback, too, but reads no environment of these processes.
        self._token = secrets.token_urlsafe(32)
        self._engine = engine or LocalEngine()
        self._running: dict[str, Process] = {}
        self._servers: set[str] = set()
        self._copies: dict[str, list[threading.Thread]] = {}  # of output, by process

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, spec: ProcessSpec, terminal: Terminal | None = None, *, note: str = "") -> None:
        """Starts a process, none of whose name may run; its output goes to its log, and to `terminal`.

        With a `note`, the log of an earlier process goes on with that line.
        """
        # No longer: a child of an earlier one may hold the pipe.
        self._end_copies(spec.name, LAST_WORDS_S)
        with self._open_log(spec.name, note) as log:
            output = subprocess.PIPE if terminal else log
            process = self._start(spec, stdout=output, stderr=output)
            if terminal and process.stdout and process.stderr:
                self._copies[spec.name] = [
                    _start_copy(process.stdout, log, terminal.stdout),
                    _start_copy(process.stderr, log, terminal.stderr),
                ]

    def next_event(self, deadline: float = math.inf) -> Exited | Signalled | None:
        """Waits for an event until `deadline`, a time of `time.monotonic`; returns None then."""
        while True:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                return None
            if not isinstance(event, ProcessExited):
                return event
            if self._running.get(event.name) is event.process:
                del self._running[event.name]
                return Exited(event.name, event.returncode)

    def stop(self) -> Signalled | None:
        """Stops all running processes; a signal during the grace period ends it, and is returned.

        Servers are stopped last: without them a worker can neither end its batch nor leave.
        """
        end = time.monotonic() + self._grace_seconds
        servers = self._servers & self._running.keys()
        others = self._running.keys() - servers
        self._send_all(others, signal.SIGTERM)
        self._send_all(self._running, signal.SIGCONT)  # a process that is paused would not notice
        signalled = self._collect_exits(others, end - self._grace_seconds / 4)
        if signalled is None:
            self._send_all(servers, signal.SIGTERM)
            signalled = self._collect_exits(self._running, end)
        self._send_all(self._running, signal.SIGKILL)
        killed = self._collect_exits(self._running, time.monotonic() + self._grace_seconds)
        signalled = killed or signalled
        for name in list(self._copies):
            self._end_copies(name, self._grace_seconds)
        return signalled

    def log_path(self, name: str) -> Path:
        """Returns the log file of a process's stdout and stderr."""
        return self._log_dir / f"{name}.log"

    def _open_log(self, name: str, note: str = "") -> IO[bytes]:
        log = self.log_path(name).open("ab" if note else "wb", buffering=0)
        if note:
            log.write(f"ps-launch: {note}\n".encode())
        return log

    def _start(
        self, spec: ProcessSpec, *, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> Process:
        process = self._engine.start(spec, self._token, stdout=stdout, stderr=stderr)
        self._running[spec.name] = process
        if spec.is_server:
            self._servers.add(spec.name)

        def report_exit() -> None:
            self._events.put(ProcessExited(spec.name, process, process.wait()))

        threading.Thread(target=report_exit, daemon=True).start()
        return process

    def _send_all(self, names: Collection[str], number: signal.Signals) -> None:
        for name in self._running.keys() & names:
            self._running[name].send(number)

    def _collect_exits(self, names: Collection[str], deadline: float) -> Signalled | None:
        """Waits until none of `names` runs; returns the signal that ended that before `deadline` did."""
        while any(name in self._running for name in names):
            match self.next_event(deadline):
                case Signalled() as signalled:
                    return signalled
                case None:
                    return None
        return None

    def _end_copies(self, name: str, limit_s: float) -> None:
        for copy in self._copies.pop(name, ()):
            copy.join(limit_s)


def free_port(host: str = HOST, wanted: str = "") -> socket.socket:
    """Returns a socket bound to a free port, which is reserved until the socket is closed.

    That is the port of the endpoint `wanted`, if it is free.
    """
    held = socket.socket()
    if wanted:
        # Connections of a server that was killed keep its port for a minute.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            held.bind((host, int(wanted.rpartition(":")[2])))
            return held
    held.bind((host, 0))
    return held


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


def to_descriptor(descriptor: int) -> Sink:
    """Returns a sink that writes to a file descriptor."""

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _start_copy(source: IO[bytes], log: IO[bytes], shown: Sink) -> threading.Thread:
    own = os.fdopen(os.dup(log.fileno()), "wb", buffering=0)  # the caller closes its log
    copy = threading.Thread(target=_copy, args=(source, own, shown), daemon=True)
    copy.start()
    return copy


def _copy(source: IO[bytes], log: IO[bytes], shown: Sink) -> None:
    """Copies `source` to its end; sinks that fail are dropped, so that the process is never blocked."""
    with source, log:
        sinks = [to_descriptor(log.fileno()), shown]
        while chunk := os.read(source.fileno(), 1 << 16):
            for sink in list(sinks):
                try:
                    sink(chunk)
                except OSError:  # a closed pipe, a full disk
                    sinks.remove(sink)
