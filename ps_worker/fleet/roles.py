"""Role makers: the role of a process, from the environment or from arguments."""

import enum
import os
from collections.abc import Sequence
from typing import Protocol

from protos.errors import RoleError
from protos.role import ServerRole, WorkerRole, require_endpoints, role_from_environment


class Role(enum.Enum):
    """Role of a process."""

    WORKER = 1
    SERVER = 2


class RoleMaker(Protocol):
    """Knows the role of this process."""

    def role(self) -> ServerRole | WorkerRole | None:
        """Returns the role; None: no cluster, everything in this process.

        Raises:
            RoleError: If there is a role, but it is not described whole.
        """
        ...


class PaddleCloudRoleMaker:
    """Reads the role from the variables that Paddle's operators and `ps-launch` set (protos/role.py)."""

    def __init__(self, is_collective: bool = False) -> None:
        """Reads nothing yet.

        Args:
            is_collective: As in Paddle; there is no collective training here.

        Raises:
            RoleError: If `is_collective`.
        """
        _refuse_collective(is_collective)

    def role(self) -> ServerRole | WorkerRole | None:
        """See `RoleMaker`."""
        return role_from_environment(os.environ)


class UserDefinedRoleMaker:
    """Takes the role from its arguments."""

    def __init__(
        self,
        is_collective: bool = False,
        *,
        current_id: int,
        role: Role,
        worker_num: int,
        server_endpoints: Sequence[str],
    ) -> None:
        """Checks the arguments.

        Args:
            is_collective: As in Paddle; there is no collective training here.
            current_id: Index of this process among those of its role, from 0.
            role: What it is.
            worker_num: Workers of the job.
            server_endpoints: "host:port" of each server, in the order that all processes share.

        Raises:
            RoleError: Names the argument that is wrong.
        """
        _refuse_collective(is_collective)
        role = _known_role(role)
        endpoints = require_endpoints(list(server_endpoints), "server_endpoints")
        if worker_num < 1:
            raise RoleError(f"worker_num is {worker_num!r}, expected at least 1")
        num_peers = worker_num if role is Role.WORKER else len(endpoints)
        if not 0 <= current_id < num_peers:
            raise RoleError(
                f"current_id is {current_id!r}, expected 0 to {num_peers - 1}: there are {num_peers} "
                f"{role.name.lower()}s"
            )
        self._role = (
            WorkerRole(endpoints=endpoints, worker_index=current_id, num_workers=worker_num)
            if role is Role.WORKER
            else ServerRole(endpoints=endpoints, server_index=current_id, num_workers=worker_num)
        )

    def role(self) -> ServerRole | WorkerRole:
        """See `RoleMaker`."""
        return self._role


def _known_role(role: object) -> Role:
    """Returns the role; Paddle's are plain numbers."""
    try:
        return Role(role)
    except ValueError:
        raise RoleError(
            f"role is {role!r}, expected fleet.Role.WORKER or fleet.Role.SERVER"
        ) from None


def _refuse_collective(is_collective: bool) -> None:
    if is_collective:
        raise RoleError(
            "is_collective=True has no counterpart: parameters are on servers here, leave it out"
        )
