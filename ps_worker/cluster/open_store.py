"""The parameters of a run: in this process, or on the servers of a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager

from ctr_ps.protos.errors import CtrPsError, TransportError, UsageError
from ctr_ps.protos.role import HeterRole, WorkerRole
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.job.sections import ClusterSection

LOCAL = WorkerRole(endpoints=(), worker_index=0, num_workers=1)
"""The role of a process without a cluster: worker 0 of 1, whose store is in this process."""


@contextmanager
def open_store(role: WorkerRole | HeterRole, limits: ClusterSection) -> Iterator[Store]:
    """Opens the worker's store; leaving the context closes the connections to servers.

    Where that fails, the servers that do answer tell the others, who wait for this worker; see
    `cluster.connect.wait_for_servers` for errors.
    """
    if role.is_in_process:
        from ctr_ps.ps_server.store import ParameterStore

        yield ParameterStore(wait_limit_s=limits.wait_timeout_s)
        return
    # Imported late: a run in one process needs no gRPC.
    from ctr_ps.ps_worker.cluster.connect import abort_unjoined, connect
    from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines

    try:
        client = connect(
            role.endpoints,
            connect_timeout_s=limits.connect_timeout_s,
            deadlines=Deadlines(rpc_s=limits.rpc_timeout_s, wait_s=limits.wait_timeout_s),
            retry_s=limits.retry_s,
            stream=limits.stream,
        )
    except CtrPsError as error:
        may_come_again = isinstance(error, TransportError) and limits.on_worker_loss == "wait"
        if not (isinstance(error, UsageError) or may_come_again):
            abort_unjoined(role, error)
        raise
    with client:
        yield client
