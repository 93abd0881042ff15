"""Role makers: the role of a process, from the environment or from arguments."""

import enum
import os
from collections.abc import Sequence
from typing import Any, Protocol

from ctr_ps.protos.errors import RoleError, counted
from ctr_ps.protos.role import (
    HeterRole,
    ServerRole,
    WorkerRole,
    require_endpoints,
    require_work,
    role_from_environment,
)
from ctr_ps.protos.role import Role as ProcessRole


class Role(enum.Enum):
    """Role of a process."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3


class RoleMaker(Protocol):
    """Knows the role of this process."""

    def role(self) -> ProcessRole | None:
        """Returns the role; None: no cluster, everything in this process.

        Raises RoleError if there is a role, but it is not described whole.
        """


class PaddleCloudRoleMaker:
    """Reads the role from the variables that Paddle's operators and `ps-launch` set (protos/role.py)."""

    def __init__(self, is_collective: bool = False) -> None:
        """Raises RoleError if `is_collective`: there is no collective training here."""
        _refuse_collective(is_collective)

    def role(self) -> ProcessRole | None:
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
        worker_num: int | None = None,
        worker_endpoints: Sequence[str] = (),
        server_endpoints: Sequence[str],
        heter_worker_endpoints: Sequence[str] = (),
        heter_worker_device: str = "cpu",
    ) -> None:
        """Takes Paddle's arguments; raises RoleError, which names the one that is wrong.

        `current_id` counts the processes of a role from 0. Without `worker_num` there are as many workers as
        `worker_endpoints`; nothing listens there. All processes share the order of servers and heter
        trainers.
        """
        _refuse_collective(is_collective)
        try:
            role = Role(role)  # Paddle's are plain numbers
        except ValueError:
            raise RoleError(
                f"role is {role!r}, expected fleet.Role.WORKER, SERVER or HETER_WORKER"
            ) from None
        endpoints = require_endpoints(list(server_endpoints), "server_endpoints")
        if worker_num is None:
            worker_num = len(worker_endpoints)
        elif worker_endpoints and len(worker_endpoints) != worker_num:
            raise RoleError(
                f"worker_num is {worker_num}, but there are {len(worker_endpoints)} worker_endpoints: give "
                "worker_num only"
            )
        if worker_num < 1:
            raise RoleError(f"worker_num is {worker_num!r}, expected at least 1")
        heter = tuple(heter_worker_endpoints)
        if heter or role is Role.HETER_WORKER:
            heter = require_endpoints(heter, "heter_worker_endpoints", "heter trainer")
        num_of = {
            Role.WORKER: worker_num,
            Role.SERVER: len(endpoints),
            Role.HETER_WORKER: len(heter),
        }
        if not 0 <= current_id < num_of[role]:
            raise RoleError(
                f"current_id is {current_id!r}, expected 0 to {num_of[role] - 1}: the job has "
                f"{counted(num_of[role], role.name.lower())}"
            )
        require_work(heter, worker_num, "heter_worker_endpoints")
        shared: dict[str, Any] = {
            "endpoints": endpoints,
            "num_workers": worker_num,
            "heter_endpoints": heter,
        }
        self._role: ProcessRole
        match role:
            case Role.WORKER:
                self._role = WorkerRole(worker_index=current_id, **shared)
            case Role.SERVER:
                self._role = ServerRole(server_index=current_id, **shared)
            case Role.HETER_WORKER:
                self._role = HeterRole(heter_index=current_id, device=heter_worker_device, **shared)

    def role(self) -> ProcessRole:
        """See `RoleMaker`."""
        return self._role


def _refuse_collective(is_collective: bool) -> None:
    if is_collective:
        raise RoleError(
            "is_collective=True is not supported, as parameters are on servers: leave it out"
        )
