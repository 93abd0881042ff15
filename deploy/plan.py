"""What a cluster on one machine consists of: the name, the command and the environment of each process.

Pure: no process is started and no port is opened here.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# What this machine's shell may have set for a role of its own must not leak into another role.
ROLE_VARIABLES = (
    "TRAINING_ROLE",
    "PADDLE_PSERVERS_IP_PORT_LIST",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ID",
    "PADDLE_PORT",
    "POD_IP",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to start: `name` is also the stem of its log file, `role` its role variables."""

    name: str
    command: tuple[str, ...]
    role: dict[str, str]


def server_specs(
    command: Sequence[str], endpoints: Sequence[str], num_workers: int
) -> list[ProcessSpec]:
    """Returns one server for each of `endpoints` ("host:port")."""
    specs = []
    for index, endpoint in enumerate(endpoints):
        host, _, port = endpoint.rpartition(":")
        role = _shared_role("PSERVER", endpoints, num_workers)
        role |= {"POD_IP": host, "PADDLE_PORT": port}
        specs.append(ProcessSpec(name=f"pserver.{index}", command=tuple(command), role=role))
    return specs


def worker_specs(
    command: Sequence[str], endpoints: Sequence[str], num_workers: int
) -> list[ProcessSpec]:
    """Returns `num_workers` workers that train against the servers at `endpoints`."""
    specs = []
    for index in range(num_workers):
        role = _shared_role("TRAINER", endpoints, num_workers)
        role |= {"PADDLE_TRAINER_ID": str(index)}
        specs.append(ProcessSpec(name=f"trainer.{index}", command=tuple(command), role=role))
    return specs


def environment_of(spec: ProcessSpec, inherited: dict[str, str]) -> dict[str, str]:
    """Returns the whole environment of a process: `inherited` less any role, plus its own role."""
    kept = {name: value for name, value in inherited.items() if name not in ROLE_VARIABLES}
    # Unbuffered, so that a process that is killed leaves all it said in its log.
    return kept | {"PYTHONUNBUFFERED": "1"} | spec.role


def exit_code_of(returncode: int) -> int:
    """Returns the exit code a shell would report: 128 + n for a process ended by signal n."""
    return 128 - returncode if returncode < 0 else returncode


def describe_end(returncode: int) -> str:
    """Returns how a process ended, as the predicate of a sentence."""
    if returncode < 0:
        return f"was ended by {signal.Signals(-returncode).name}"
    return f"exited with code {returncode}"


def _shared_role(role: str, endpoints: Sequence[str], num_workers: int) -> dict[str, str]:
    return {
        "TRAINING_ROLE": role,
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(num_workers),
    }
