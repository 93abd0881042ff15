"""Faults of a worker's calls, for tests of a cluster; `ps-launch --chaos` asks for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctr_ps.ps_worker.cluster.grpc_transport import Disturb

CHAOS = "CTR_PS_CHAOS"


def faults_of(environment: Mapping[str, str]) -> "Disturb | None":
    """Returns what puts the faults of `CTR_PS_CHAOS` into calls; None without that variable.

    Raises UsageError if the variable cannot be read, or the journal cannot be written.
    """
    if not (text := environment.get(CHAOS)):
        return None
    from ctr_ps.ps_worker.extras.chaos.channels import disturb_by  # late: it loads gRPC

    return disturb_by(text)
