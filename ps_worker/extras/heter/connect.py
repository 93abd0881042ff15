"""A worker's way to the heter trainers of its job, and a job that they can train."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.heter import HETER_CALLS
from ctr_ps.ps_worker.cluster.slow_calls import BUDGET_S
from ctr_ps.ps_worker.extras.chaos import faults_of
from ctr_ps.ps_worker.extras.heter.dense_part import module_of
from ctr_ps.ps_worker.extras.heter.trainers import FrontModel, HeterTrainers
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import ModelPlan

P = TypeVar("P", bound=ModelPlan)

_MODES = ("sync", "half_async", "async")
_RETRY_SHARE = 1 / 3
"""Of a lease: the error that names a heter trainer comes before servers end the job since they lost it.

They hear of it every third of a lease (ps_worker/run/membership/lease.py), so they lose it no sooner than two
thirds after its end: a third is left for the error to reach them."""


def require_heter(job: Job, model: Model) -> None:
    """Refuses what heter trainers cannot train.

    Raises:
        JobError: Names the key of the job.
    """
    try:
        module = module_of(model)
    except UsageError as error:
        raise job.error("model.name", str(error)) from error
    if job.strategy.mode not in _MODES:
        raise job.error(
            "strategy.mode",
            f"strategy.mode is {job.strategy.mode!r}, but with heter trainers it is one of "
            f"{', '.join(_MODES)}",
        )
    if job.cluster.on_worker_loss == "wait":
        raise job.error(
            "cluster.on_worker_loss",
            'cluster.on_worker_loss is "wait", but in a job with heter trainers no process can take the '
            'place of a lost one: set "fail" or "continue"',
        )
    if job.strategy.mode == "sync" and job.train.thread_num > 1:
        raise job.error(
            "train.thread_num",
            f"train.thread_num is {job.train.thread_num}, but with heter trainers each CPU trainer brings "
            f"one batch to a synchronous step: set it to 1 and start more CPU trainers",
        )
    if job.train.clip_norm:
        raise job.error(
            "train.clip_norm",
            f"train.clip_norm is {job.train.clip_norm:g}, but with heter trainers no process has the whole "
            f"gradient of a batch, of rows and of dense parameters: remove it, and lower the learning rates "
            f"or give them a warm-up ([optimizer.schedule])",
        )
    if module.schema.weight is not None:
        raise job.error(
            "data.schema",
            f"the schema has the weight {module.schema.weight!r}, but heter trainers take no sample weights: "
            f"leave 'weight' out of the schema, or train without heter trainers",
        )
    if job.data.negative_correction == "weight":
        raise job.error(
            "data.negative_correction",
            'data.negative_correction is "weight", but heter trainers take no sample weights: set "logit"',
        )
    if job.data.shuffle == "global":
        raise job.error(
            "data.shuffle",
            'data.shuffle is "global", but heter trainers take no part in an exchange of rows: set "local"',
        )


def takes_over(job: Job) -> bool:
    """Whether a heter trainer takes over from one that is lost.

    Not synchronously: it may have pushed its part of the step that the lost one was at.
    """
    return job.cluster.on_worker_loss == "continue" and job.strategy.mode != "sync"


def heter_trainers(endpoints: Sequence[str], job: Job, *, worker: int) -> HeterTrainers | None:
    """Returns a worker's way to the heter trainers; None: the job has none."""
    if not endpoints:
        return None
    # Imported late: a run in one process needs no gRPC.
    from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport

    limits = job.cluster
    retry_s = BUDGET_S if limits.retry_s is None else limits.retry_s
    transport = GrpcTransport(
        endpoints,
        Deadlines(rpc_s=limits.rpc_timeout_s, wait_s=limits.wait_timeout_s),
        retry_s=min(retry_s, _RETRY_SHARE * limits.lease_s),
        calls=HETER_CALLS,
        disturb=faults_of(os.environ),
    )
    return HeterTrainers(transport, worker=worker, takes_over=takes_over(job))


def before_the_cut(plan: P, heter: HeterTrainers | None) -> P:
    """Returns the plan of a worker that trains the layers before the cut, and `heter` the others.

    Raises:
        UsageError: If the model cannot be cut.
    """
    return plan if heter is None else replace(plan, trained=FrontModel(plan.trained, heter))
