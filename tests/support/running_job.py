"""A job of real processes, which can be killed, paused, and restarted by the same command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ctr_ps.deploy import tether
from tests.support.commands import COMMANDS, ROOT, clean_environment
from tests.support.network import Hosts
from tests.support.processes import environment_at, free_port

LIMIT_S = 120.0
_LOOK_S = 0.05


def training(settings: Mapping[str, str]) -> list[object]:
    """Returns the command of workers that train with settings by section and key."""
    overrides = [f"--set={key}={value}" for key, value in settings.items()]
    return [COMMANDS / "ps-worker", "train", ROOT / "examples/ctr_dnn.toml", "--json", *overrides]


class RunningJob:
    """Servers, with update logs by default, and workers: processes "server.0", "worker.1" and so on.

    Leaving the `with` block kills running processes. Each start of a process has a log of its own.
    """

    def __init__(
        self,
        folder: Path,
        worker_command: Sequence[object],
        *,
        num_servers: int = 2,
        num_workers: int = 2,
        job_size: int | str | None = None,
        server_options: Sequence[str] = (),
        update_logs: bool = True,
        environment: Mapping[str, str] | None = None,
        network: Hosts | None = None,
    ) -> None:
        """Starts all processes: `worker_command` as workers, of a job with `job_size` of them, as "2:4".

        `server_options` are beside those of update logs, `environment` beside roles. With a `network`, each
        process runs on the host of its name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._worker_command = worker_command
        self._server_options = server_options
        self._update_logs = update_logs
        self._environment = environment or {}
        self._network = network
        self._job_size = job_size or num_workers
        with ExitStack() as stack:
            self.ports = [stack.enter_context(free_port()) for _ in range(num_servers)]
        self.servers = [f"server.{index}" for index in range(num_servers)]
        self.endpoints = [
            f"{network.addresses[server] if network else '127.0.0.1'}:{port}"
            for server, port in zip(self.servers, self.ports, strict=True)
        ]
        self.workers = [f"worker.{index}" for index in range(num_workers)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # of which release a process is from its next start on; see tests/support/releases.py
        self.releases: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        self._listed = list(self.endpoints)  # in the environment of all processes
        for name in (*self.servers, *self.workers):
            self.start(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.processes:
            self.kill(name)

    # Processes

    def start(self, name: str) -> None:
        """Starts or restarts a process, with the same command, environment and port.

        Names other than "server" are workers: "twin.1" is a second process with the index of "worker.1".
        """
        kind, _, index = name.partition(".")
        is_server = kind == "server"
        role = environment_at(self._listed, 0, self._job_size)
        if is_server:
            role["POD_IP"], _, role["PADDLE_PORT"] = self.endpoints[int(index)].rpartition(":")
        else:
            role |= {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": index}
        log = [f"--update-log={self.update_log(name)}"] if self._update_logs else []
        server_command = [COMMANDS / "ps-server", "--spare", *log, *self._server_options]
        command = server_command if is_server else self._worker_command
        if (release := self.releases.get(name)) is not None:
            own = Path(str(command[0])).name
            command = [sys.executable, "-m", "tests.support.releases", release, own, *command[1:]]
        if self._network is not None:
            command = self._network.command(name, command)
        self._starts[name] = self._starts.get(name, 0) + 1
        with (
            self._output(name, "out").open("wb") as output,
            self._output(name).open("wb") as log_file,
        ):
            self.processes[name] = subprocess.Popen(
                [sys.executable, tether.__file__, str(os.getpid()), *map(str, command)],
                env={**clean_environment(), **self._environment, **role},
                stdout=output,
                stderr=log_file,
            )

    def start_spare(self) -> str:
        """Starts one server more, which waits to be added; returns its endpoint."""
        with free_port() as port:
            self.ports.append(port)
        name = f"server.{len(self.servers)}"
        self.servers.append(name)
        self.endpoints.append(f"127.0.0.1:{port}")
        self.start(name)
        return self.endpoints[-1]

    def cluster(self, *arguments: object) -> subprocess.Popen[str]:
        """Starts `ps-cluster` with a command, told where server 0 is."""
        return subprocess.Popen(
            [str(COMMANDS / "ps-cluster"), self.endpoints[0], *map(str, arguments)],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def num_starts(self, *names: str) -> int:
        return sum(self._starts[name] for name in names)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.wait(LIMIT_S)

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def pause(self, name: str) -> None:
        """Stops a process until `resume`; its connections stay open."""
        self.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def is_running(self, name: str) -> bool:
        return self.processes[name].poll() is None

    @property
    def are_all_running(self) -> bool:
        return all(map(self.is_running, self.processes))

    def wait(self, *names: str, limit_s: float = LIMIT_S) -> dict[str, int]:
        """Waits until processes end, by default all; returns their exit codes.

        AssertionError, with the state of each, if one does not end.
        """
        end = time.monotonic() + limit_s
        codes = {}
        for name in names or tuple(self.processes):
            try:
                codes[name] = self.processes[name].wait(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} did not end in {limit_s:g} s\n{self.tails}") from None
        return codes

    # What they have written

    def update_log(self, name: str) -> Path:
        return self.folder / f"{name}.updates"

    def _output(self, name: str, kind: str = "log") -> Path:
        return self.folder / f"{name}.{self._starts[name]}.{kind}"

    def log(self, name: str) -> str:
        return self._output(name).read_text()

    def error(self, name: str) -> str:
        """Returns the error that ended a process, or else the last line of its log."""
        lines = self.log(name).splitlines()
        return next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1])

    @property
    def tails(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-12:]) for log in logs
        )

    def wait_for(self, name: str, pattern: str) -> re.Match[str]:
        """Waits until a process has logged `pattern` since its start.

        AssertionError if it ends before, or that takes too long.
        """
        end = time.monotonic() + LIMIT_S
        while True:
            is_running = self.is_running(name)
            if (match := re.search(pattern, self.log(name))) is not None:
                return match
            if not is_running or time.monotonic() > end:
                raise AssertionError(f"{name} has not logged {pattern!r}\n{self.tails}")
            time.sleep(_LOOK_S)

    def wait_for_steps(self) -> None:
        for name in self.workers:
            self.wait_for(name, r" step=\d+ ")

    def result(self, name: str = "worker.0") -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self._output(name, "out").read_text().splitlines()[-1])
        return result
