"""Opening tables: in this process, or on a cluster."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from ctr_ps.protos.errors import RoleError, UsageError
from ctr_ps.protos.role import WorkerRole, require_endpoints, role_from_environment
from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
from ctr_ps.ps_worker.job.reading import override_job
from ctr_ps.ps_worker.run.membership import Membership
from ctr_ps.ps_worker.run.plan import terms_of
from ctr_ps.ps_worker.torch.tables import Tables


@contextmanager
def open_tables(
    *,
    servers: Sequence[str] | None = None,
    worker: int = 0,
    num_workers: int = 1,
    mode: Literal["sync", "async"] = "sync",
    optimizer: str | Mapping[str, str | float] = "adagrad",
    schedule: Mapping[str, str | float] | None = None,
    life: Mapping[str, Any] | None = None,
    seed: int = 0,
    cluster: Mapping[str, Any] | None = None,
    max_pending_mb: int = 1024,
) -> Iterator[Tables]:
    """Opens tables as worker `worker` of `num_workers`, for joint training, once all workers have joined.

    At the end of the block the worker leaves the job. An error in the block aborts the job, so that no other
    worker waits.

    Args:
        servers: "host:port" of each `ps-server`, in the order that all processes share; None: from the
            environment (protos/role.py), without a role there in this process.
        worker: Index of this worker, with `servers`.
        num_workers: Workers of the job, with `servers`.
        mode: "sync": workers take each step together, which applies the mean of their gradients. "async":
            pushes are applied as they arrive.
        optimizer: Default optimizer of the tables' rows, as in a job.
        schedule: Schedule of the learning rates of all tables, as `[optimizer.schedule]` of a job; its steps
            are those of all workers together. None: constant rates.
        life: When keys get and lose rows, as the section [life] of a job; `Tables.shrink` ends a pass.
        seed: Seed of the rows' initial values.
        cluster: Time limits, as the section [cluster] of a job.
        max_pending_mb: Limit of the size of unpushed gradients.

    Raises:
        JobError: If a setting is wrong, or workers disagree.
        CtrPsError: If servers do not answer, or other workers do not join.
    """
    role = _role_of(servers, worker, num_workers)
    job = override_job(
        {
            "model": "ctr_ps.torch",
            "strategy": {"mode": mode},
            "optimizer": {"sparse": optimizer, "schedule": schedule or {}},
            "train": {"seed": seed},
            "life": life or {},
            "cluster": cluster or {},
        },
        (),
        source="open_tables",
    )
    if job.strategy.mode not in ("sync", "async"):
        raise job.error(
            "strategy.mode", f"mode is {job.strategy.mode!r}, expected 'sync' or 'async'"
        )
    if job.cluster.on_worker_loss == "wait":
        raise job.error(
            "cluster.on_worker_loss",
            "on_worker_loss is 'wait', but nobody knows the position of a lost worker's own loop: expected "
            "'fail' or 'continue'",
        )
    if max_pending_mb < 1:
        raise UsageError(f"max_pending_mb is {max_pending_mb}, expected at least 1")
    with (
        open_store(role, job.cluster) as store,
        Membership(
            store,
            role.worker_index,
            terms=terms_of(job, role.members),
            limits=job.cluster,
            is_in_process=role.is_in_process,
        ) as membership,
    ):
        tables = Tables(
            store,
            membership,
            job,
            num_workers=role.num_workers,
            max_pending_bytes=max_pending_mb * 2**20,
        )
        try:
            yield tables
            tables.require_unwritten()
            tables.warn_of_waiting("the end of the tables' block")
            membership.leave(tables.version)
        finally:
            tables.close()


def _role_of(servers: Sequence[str] | None, worker: int, num_workers: int) -> WorkerRole:
    if servers is None and (worker, num_workers) != (0, 1):
        raise RoleError(
            f"worker {worker} of {num_workers} has no servers: give servers=, or leave out worker= and "
            "num_workers= to take all three from the environment"
        )
    if servers is not None:
        endpoints = require_endpoints(list(servers), "servers")
        if not 0 <= worker < num_workers:
            raise RoleError(f"worker is {worker}, expected 0 to {num_workers - 1}")
        return WorkerRole(endpoints=endpoints, worker_index=worker, num_workers=num_workers)
    role = role_from_environment(os.environ) or LOCAL
    if not isinstance(role, WorkerRole):
        raise RoleError("TRAINING_ROLE is not TRAINER, but only workers open tables")
    if role.heter_endpoints:
        raise RoleError(
            "this job has heter trainers, which your own training loop cannot use: start none"
        )
    return role
