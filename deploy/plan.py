"""Plan of a cluster: name, command and environment of each process.

Starts no process and opens no port.
"""

import shlex
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from ctr_ps.protos.role import (
    HETER_DEVICE,
    HETER_TRAINERS,
    HOST,
    NUM_WORKERS,
    PORT,
    ROLE,
    SERVERS,
    STAGE,
    STAGES,
    WORKER_INDEX,
)

# Inherited values of these must not leak into the role of a process.
ROLE_VARIABLES = (
    ROLE,
    SERVERS,
    NUM_WORKERS,
    WORKER_INDEX,
    PORT,
    HOST,
    *HETER_TRAINERS,
    "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST",  # which only Paddle reads
    STAGE,
    STAGES,
    HETER_DEVICE,
)

CREDENTIALS = ("CTR_PS_TOKEN", "CTR_PS_TOKEN_FILE", "CTR_PS_TLS_CERT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Commands of all roles: of our own programs for a job, or of a script."""

    server: tuple[str, ...]
    worker: tuple[str, ...]
    heter: tuple[str, ...] = ()
    are_of_job: bool = False

    def with_setting(self, override: str) -> "Commands":
        """Returns these with one more `--set` for workers and heter trainers."""
        setting = ("--set", override)
        return replace(self, worker=(*self.worker, *setting), heter=(*self.heter, *setting))


def is_script(program: object) -> bool:
    """Whether a path names a script for both roles, not a job."""
    return str(program).endswith(".py")


def commands_of_script(
    script: Path, arguments: Sequence[str], of_jobs: Mapping[str, object]
) -> Commands:
    """Returns the commands of a script: the same for all roles, run by this Python.

    Raises typer.BadParameter if one of `of_jobs`, the options that only jobs accept, has a value.
    """
    if given := [option for option, value in of_jobs.items() if value]:
        raise typer.BadParameter(
            f"{', '.join(given)} is for jobs, but {str(script)!r} is a script: put the script's own "
            f"arguments after its name"
        )
    command = (sys.executable, str(script), *arguments)
    return Commands(server=command, worker=command, heter=command)


def commands_of_job(
    job: Path,
    arguments: Sequence[str],
    *,
    server: str,
    worker: str,
    heter: str,
    overrides: Sequence[str],
    as_json: bool,
) -> Commands:
    """Returns the commands of a job: workers and heter trainers get the job and its overrides.

    `server`, `worker` and `heter` are command lines. Raises typer.BadParameter if there are `arguments`, or a
    program is not installed.
    """
    if arguments:
        raise typer.BadParameter(
            f"{shlex.join(arguments)} follows a job: only a script (.py) has arguments of its own"
        )
    options = [word for override in overrides for word in ("--set", override)]
    options += ["--json"] if as_json else []
    return Commands(
        server=split_command(server),
        worker=(*split_command(worker), str(job), *options),
        heter=(*split_command(heter), str(job), *options),
        are_of_job=True,
    )


def split_command(line: str) -> tuple[str, ...]:
    """Splits a command line; the program is looked up next to this Python, then on PATH.

    Raises typer.BadParameter if there is no such program.
    """
    program, *arguments = shlex.split(line) or [""]
    beside = Path(sys.executable).parent / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        raise typer.BadParameter(
            f"no program {program!r} next to {sys.executable} or on PATH: is the package installed?"
        )
    return (found, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to start; `name` is also the stem of its log file.

    `role` has its role variables, `variables` others of its own.
    """

    name: str
    command: tuple[str, ...]
    role: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def is_server(self) -> bool:
        """Whether it has the role of a server."""
        return self.role.get(ROLE) == "PSERVER"


@dataclass(frozen=True, slots=True)
class Plan:
    """Processes of a cluster: servers and heter trainers at their endpoints ("host:port"), and workers."""

    endpoints: Sequence[str]
    num_workers: int
    heter_endpoints: Sequence[str] = ()

    def servers(self, command: Sequence[str]) -> list[ProcessSpec]:
        """Returns the servers."""
        return _processes("pserver", command, self._role("PSERVER"), map(_own, self.endpoints))

    def spares(self, command: Sequence[str], endpoints: Sequence[str]) -> list[ProcessSpec]:
        """Returns servers at other endpoints, which wait to be added."""
        if not endpoints:
            return []
        return _processes(
            "spare", (*command, "--spare"), self._role("PSERVER"), map(_own, endpoints)
        )

    def workers(self, command: Sequence[str]) -> list[ProcessSpec]:
        """Returns the workers."""
        role = self._role("TRAINER") | ({STAGE: "1"} if self.heter_endpoints else {})
        own = ({WORKER_INDEX: str(index)} for index in range(self.num_workers))
        return _processes("trainer", command, role, own)

    def heter_trainers(self, command: Sequence[str], device: str) -> list[ProcessSpec]:
        """Returns the heter trainers, on a device "cpu" or "gpu"."""
        role = self._role("HETER_TRAINER") | {STAGE: "2", HETER_DEVICE: device}
        return _processes("heter", command, role, map(_own, self.heter_endpoints))

    def _role(self, role: str) -> dict[str, str]:
        shared = {
            ROLE: role,
            SERVERS: ",".join(self.endpoints),
            NUM_WORKERS: str(self.num_workers),
        }
        if self.heter_endpoints:
            shared |= {HETER_TRAINERS[0]: ",".join(self.heter_endpoints), STAGES: "2"}
        return shared


def _processes(
    kind: str, command: Sequence[str], role: dict[str, str], own: Iterable[dict[str, str]]
) -> list[ProcessSpec]:
    return [
        ProcessSpec(name=f"{kind}.{index}", command=tuple(command), role=role | each)
        for index, each in enumerate(own)
    ]


def _own(endpoint: str) -> dict[str, str]:
    host, _, port = endpoint.rpartition(":")
    return {HOST: host, PORT: port}


def with_update_logs(
    servers: Sequence[ProcessSpec], folder: Path, kind: str = "server"
) -> list[ProcessSpec]:
    """Returns the servers, each with a folder of its own in `folder` for its update log."""
    return [
        replace(spec, command=(*spec.command, "--update-log", str(folder / f"{kind}-{index}")))
        for index, spec in enumerate(servers)
    ]


def environment_of(spec: ProcessSpec, inherited: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a process: `inherited` without role variables, plus its own ones."""
    kept = {name: value for name, value in inherited.items() if name not in ROLE_VARIABLES}
    # Unbuffered, so that the log of a killed process is complete.
    return kept | {"PYTHONUNBUFFERED": "1"} | spec.role | spec.variables


def with_token(inherited: dict[str, str], token: str) -> dict[str, str]:
    """Returns an environment with a token by which the processes of a cluster know each other.

    Where it has a token or a certificate already, as it is: those are what its owner wants.
    """
    if any(inherited.get(name) for name in CREDENTIALS):
        return inherited
    return inherited | {"CTR_PS_TOKEN": token}


def exit_code_of(returncode: int) -> int:
    """Returns the exit code as shells report it: 128 + n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """Returns how a process exited, as the predicate of a sentence."""
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with code {returncode}"
