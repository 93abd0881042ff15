"""Plan of a cluster on one machine: name, command and environment of each process.

Pure: starts no process and opens no port.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
class ProcessSpec:
    """A process to start.

    Attributes:
        name: Also the stem of its log file.
        command: Program and arguments.
        role: Its role variables.
        variables: Others of its own.
    """

    name: str
    command: tuple[str, ...]
    role: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def is_server(self) -> bool:
        """Whether it has the role of a server."""
        return self.role.get(ROLE) == "PSERVER"


def server_specs(
    command: Sequence[str],
    endpoints: Sequence[str],
    num_workers: int,
    heter_endpoints: Sequence[str] = (),
) -> list[ProcessSpec]:
    """Returns a server for each of `endpoints` ("host:port")."""
    specs = []
    for index, endpoint in enumerate(endpoints):
        role = _shared_role("PSERVER", endpoints, num_workers, heter_endpoints) | _own(endpoint)
        specs.append(ProcessSpec(name=f"pserver.{index}", command=tuple(command), role=role))
    return specs


def worker_specs(
    command: Sequence[str],
    endpoints: Sequence[str],
    num_workers: int,
    heter_endpoints: Sequence[str] = (),
) -> list[ProcessSpec]:
    """Returns `num_workers` workers for the servers at `endpoints`."""
    specs = []
    for index in range(num_workers):
        role = _shared_role("TRAINER", endpoints, num_workers, heter_endpoints)
        role |= {WORKER_INDEX: str(index)}
        if heter_endpoints:
            role |= {STAGE: "1"}
        specs.append(ProcessSpec(name=f"trainer.{index}", command=tuple(command), role=role))
    return specs


def heter_specs(
    command: Sequence[str],
    endpoints: Sequence[str],
    num_workers: int,
    heter_endpoints: Sequence[str],
    *,
    device: str = "cpu",
) -> list[ProcessSpec]:
    """Returns a heter trainer for each of `heter_endpoints`, on a device "cpu" or "gpu"."""
    specs = []
    for index, endpoint in enumerate(heter_endpoints):
        role = _shared_role("HETER_TRAINER", endpoints, num_workers, heter_endpoints)
        role |= _own(endpoint) | {STAGE: "2", HETER_DEVICE: device}
        specs.append(ProcessSpec(name=f"heter.{index}", command=tuple(command), role=role))
    return specs


def with_update_logs(servers: Sequence[ProcessSpec], folder: Path) -> list[ProcessSpec]:
    """Returns the servers, each with a folder of its own in `folder` for its update log."""
    return [
        replace(spec, command=(*spec.command, "--update-log", str(folder / f"server-{index}")))
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


def _shared_role(
    role: str, endpoints: Sequence[str], num_workers: int, heter_endpoints: Sequence[str]
) -> dict[str, str]:
    shared = {
        ROLE: role,
        SERVERS: ",".join(endpoints),
        NUM_WORKERS: str(num_workers),
    }
    if heter_endpoints:
        shared |= {
            HETER_TRAINERS[0]: ",".join(heter_endpoints),
            STAGES: "2",
        }
    return shared


def _own(endpoint: str) -> dict[str, str]:
    host, _, port = endpoint.rpartition(":")
    return {HOST: host, PORT: port}
