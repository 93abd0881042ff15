"""Processes that end with their test, and `ps-server` as one of them."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ctr_ps.deploy import tether
from tests.support.commands import clean_environment

LIMIT_S = 60.0


@contextmanager
def started(
    command: Sequence[object],
    environment: Mapping[str, str] | None = None,
    stdin: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command, with pipes for its output, for the time of the block; then it is killed.

    It obeys SIGINT and SIGHUP, even if the shell that runs the tests in the background ignores them.
    """
    with heeded(signal.SIGINT), heeded(signal.SIGHUP):
        process = subprocess.Popen(
            [sys.executable, tether.__file__, str(os.getpid()), *map(str, command)],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """Restores the signal's default for processes started in the block."""
    is_ignored = signal.getsignal(number) is signal.SIG_IGN
    if is_ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def free_port() -> Iterator[int]:
    """Yields a port of the loopback interface that nothing listens on.

    It is outside of the range for automatic ports, so that it stays free until its process has started,
    unless metrics ports took it.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10_000, low), *range(high + 1, 2**16)] or [0]
    with socket.socket() as held:
        while True:
            with suppress(OSError):
                held.bind(("127.0.0.1", secrets.choice(ports)))
                break
        yield held.getsockname()[1]


def environment_of(ports: Sequence[int], index: int, num_workers: int = 1) -> dict[str, str]:
    """Returns the role variables of server `index`, by ports of the loopback interface."""
    return environment_at([f"127.0.0.1:{port}" for port in ports], index, num_workers)


def environment_at(
    endpoints: Sequence[str], index: int, num_workers: int | str = 1
) -> dict[str, str]:
    """Returns the role variables of server `index`, by host:port of all servers."""
    host, port = endpoints[index].split(":")
    return {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(num_workers),
        "POD_IP": host,
        "PADDLE_PORT": port,
    }


class ServerProcess:
    def __init__(self, environment: dict[str, str], log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ctr_ps.ps_server.cli", *arguments],
                env={**clean_environment(), **environment},
                stdout=output,
                stderr=output,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)


@contextmanager
def server_process(
    environment: dict[str, str], log: Path, *arguments: str
) -> Iterator[ServerProcess]:
    """Runs a `ps-server` for the time of the block; then it is killed."""
    server = ServerProcess(environment, log, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait(LIMIT_S)
