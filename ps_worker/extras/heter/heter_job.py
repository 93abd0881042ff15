"""A heter trainer's part of a training job, from its plan to its figures.

bind -> join, declare -> serve -> start -> | batches, barriers | until all CPU trainers have left -> leave
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from ctr_ps.protos.role import HeterRole, address_to_bind
from ctr_ps.protos.store import Store
from ctr_ps.protos.wire.heter import Attend
from ctr_ps.protos.wire.security.credentials import Credentials, require_protection
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator
from ctr_ps.ps_worker.extras.heter.connect import require_heter, takes_over
from ctr_ps.ps_worker.extras.heter.dense_part import DensePart
from ctr_ps.ps_worker.extras.heter.inbox import Inbox
from ctr_ps.ps_worker.extras.heter.joining import Joining
from ctr_ps.ps_worker.extras.heter.service import HeterService
from ctr_ps.ps_worker.extras.heter.trainer import HeterTrainer
from ctr_ps.ps_worker.extras.heter.trainers import heter_trainer_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import errors_of_model, trained_model
from ctr_ps.ps_worker.run.plan import ModelPlan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.termination import EXIT_CODE

logger = logging.getLogger(__name__)


def train_heter(
    plan: ModelPlan,
    store: Store,
    *,
    host: str,
    on_joined: Callable[[Run], None] = lambda _: None,
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trains the dense part of a model until all CPU trainers have left; returns figures.

    Args:
        plan: What to train, a module of PyTorch, in the role of a heter trainer.
        store: The parameters.
        host: Address to serve at, with the port of its role.
        on_joined: Called once this process has its place in the job.
        is_told_to_end: Whether it is to end before, and the job goes on.

    Raises:
        SystemExit: With the exit code of SIGTERM, if it was told to end.
        CtrPsError: If anything goes wrong; says what.
    """
    job, model, role = plan.job, plan.model, plan.role
    assert isinstance(role, HeterRole), "its callers check the role"
    require_heter(job, model)
    credentials = Credentials.from_environment()
    require_protection(host, credentials)
    with (
        errors_of_model(job),
        Run(store, plan) as run,
        HeterService(address_to_bind(host, role.port), credentials) as service,
    ):
        on_joined(run)
        part = DensePart(trained_model(job, model), device=role.device)
        inbox = Inbox(
            _joining(job, role),
            part.require,
            barriers_passed=1,  # the start
            wait_limit_s=job.cluster.wait_timeout_s,
        )
        service.start(inbox)
        logger.info(
            "serving heter_trainer=%d heter_trainers=%s workers=%d device=%s",
            role.heter_index,
            ",".join(role.heter_endpoints),
            role.num_workers,
            role.device,
        )
        communicator = run.communicator
        assert isinstance(communicator, HalfAsyncCommunicator), "modes are checked above"
        trainer = HeterTrainer(
            part,
            communicator,
            inbox,
            come=_coming(run),
            gone=lambda: _gone(store),
        )
        trainer.train(is_told_to_end)
        if is_told_to_end():
            run.end_early()
            raise SystemExit(EXIT_CODE)
        run.leave()
    progress = trainer.progress
    return {"examples": progress.examples, "batches": progress.batches, "steps": progress.steps}


def _joining(job: Job, role: HeterRole) -> Joining[Any]:
    num_heter = len(role.heter_endpoints)
    served = [
        worker
        for worker in range(role.num_workers)
        if takes_over(job) or heter_trainer_of(worker, num_heter) == role.heter_index
    ]
    is_sync = job.strategy.mode == "sync"
    return Joining(served, is_sync=is_sync, max_joined=job.heter.max_joined)


def _coming(run: Run) -> Callable[[Attend], None]:
    return lambda barrier: run.attend(barrier.name, size=barrier.size, op=barrier.op)


def _gone(store: Store) -> Collection[int]:
    store.wait_version(0).result()  # is there since the start, and raises if the job has ended
    return store.status().left
