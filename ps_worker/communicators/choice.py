"""The communicator of a job's mode."""

import logging
from typing import Any, assert_never

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.role import HeterRole, WorkerRole
from ctr_ps.protos.store import Member, Store
from ctr_ps.ps_worker.communicators.asynchronous import (
    AsyncCommunicator,
    BoundedStalenessCommunicator,
)
from ctr_ps.ps_worker.communicators.communicator import Communicator, DirectCommunicator
from ctr_ps.ps_worker.communicators.geo import GeoCommunicator
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator, SyncCommunicator
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import ModelSpecs
from ctr_ps.ps_worker.job.strategy import AsyncSettings

logger = logging.getLogger(__name__)


def communicator_of(
    job: Job,
    store: Store,
    model: Model,
    specs: ModelSpecs,
    role: WorkerRole | HeterRole,
    *,
    member: Member,
    num_training: int | None = None,
    batches_before: int = 0,
) -> Communicator:
    """Returns the communicator of the job's mode, for a store where all is declared.

    In process there is nothing to gain from sending in the background; a heter trainer takes each step with
    fresh parameters, and its clock stands still. `num_training` workers have rows to train on; None: all. The
    model of a CPU trainer is the part in front of the cut.
    """
    strategy, num_params, num_workers = job.strategy, model.num_params, role.num_workers
    is_in_process, is_heter_trainer = role.is_in_process, isinstance(role, HeterRole)
    is_pass = job.device.tables == "pass"
    _tell_of_wire_dtype(job, sends=not (is_in_process or is_pass or is_heter_trainer))
    # With tables on a device its trainer pushes whole passes, and numbers them here.
    if is_pass or (strategy.mode == "async" and is_in_process):
        return DirectCommunicator(store, member=member, num_params=num_params)
    # Batches that come one after another through a trainer are late for nobody.
    mode = "half_async" if strategy.mode == "async" and is_heter_trainer else strategy.mode
    match mode:
        case "sync":
            return SyncCommunicator(store, member=member, num_params=num_params)
        case "half_async":
            return HalfAsyncCommunicator(store, member=member, num_params=num_params)
        case "bounded_staleness":
            return BoundedStalenessCommunicator(
                member=member,
                num_params=num_params,
                is_alone=is_in_process and num_workers == 1,
                **_sending(strategy.bounded_staleness, job, store),
            )
        case "geo":
            return GeoCommunicator(
                store,
                member=member,
                num_workers=num_workers if num_training is None else num_training,
                tables=specs.tables,
                dense=specs.dense,
                k_steps=strategy.geo.k_steps,
                max_replica_bytes=strategy.geo.max_replica_mb * 2**20,
                stall_limit_s=job.cluster.wait_timeout_s,
                batches_before=batches_before,
            )
        case "async":
            return AsyncCommunicator(
                member=member,
                num_params=num_params,
                clocks=store if num_workers > 1 and not role.heter_endpoints else None,
                **_sending(strategy.async_, job, store),
            )
        case _:
            assert_never(mode)


def _tell_of_wire_dtype(job: Job, *, sends: bool) -> None:
    key = f"{job.strategy.mode}.wire_dtype"
    if job.strategy.in_use().get(key, "float32") == "float32":
        return
    if sends:
        logger.info("numbers are sent and received as bfloat16 (strategy.%s)", key)
    else:
        logger.warning(
            "strategy.%s has no effect: in process nothing is sent, and passes on a device and heter "
            "trainers send float32",
            key,
        )


def _sending(settings: AsyncSettings, job: Job, store: Store) -> dict[str, Any]:
    """Returns the arguments of an asynchronous communicator that say how it sends."""
    return {
        **settings.model_dump(exclude={"wire_dtype"}),
        "store": store.with_bfloat16() if settings.wire_dtype == "bfloat16" else store,
        "stall_limit_s": job.cluster.wait_timeout_s,
    }
