"""Processes that no test leaves behind, and `ps-server` as one of them."""

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy import tether
from tests.support.commands import clean_environment

LIMIT_S = 60.0


@contextmanager
def started(
    command: Sequence[object], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command for the time of the block; if it has not ended then, or the tests end, it is killed.

    Its output is in pipes. It heeds SIGINT and SIGHUP also where these tests run in the background of a shell
    that ignores them for its children.
    """
    with heeded(signal.SIGINT), heeded(signal.SIGHUP):
        process = subprocess.Popen(
            [sys.executable, tether.__file__, str(os.getpid()), *map(str, command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def heeded(number: signal.Signals) -> Iterator[None]:
    """Lets the processes that are started meanwhile have the signal's default."""
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
    """Lends a port of the loopback interface that nothing listens on.

    It is none of those that the system gives to sockets without a wish, so that it stays free until its
    process has started: in a network of its own nobody holds it, and metrics ports would take it at times.
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
    """Returns the role variables of server `index`, given ports of the loopback interface."""
    return environment_at([f"127.0.0.1:{port}" for port in ports], index, num_workers)


def environment_at(endpoints: Sequence[str], index: int, num_workers: int = 1) -> dict[str, str]:
    """Returns the role variables of server `index`, given all servers' host:port."""
    host, port = endpoints[index].split(":")
    return {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(num_workers),
        "POD_IP": host,
        "PADDLE_PORT": port,
    }


class ServerProcess:
    """A running `ps-server`."""

    def __init__(self, environment: dict[str, str], log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ps_server.cli", *arguments],
                env={**clean_environment(), **environment},
                stdout=output,
                stderr=output,
            )

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()

    def wait(self) -> int:
        """Waits until it ends and returns its exit code."""
        return self.process.wait(LIMIT_S)


@contextmanager
def server_process(
    environment: dict[str, str], log: Path, *arguments: str
) -> Iterator[ServerProcess]:
    """Runs a `ps-server` for the time of the block; it is killed if it has not ended."""
    server = ServerProcess(environment, log, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait(LIMIT_S)
