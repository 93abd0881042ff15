"""A heter trainer's part of a training job, from its plan to its figures.

    bind -> join, declare -> serve -> start -> train until all CPU trainers have left -> leave

    next --batches--> parameters -> forward, backward -> answers -> push, synchronously as a part of the step
      |  --barrier--> come to it as well
      `--nothing----> who has left? Is the job still there?

As a part of a synchronous step it counts no examples: the parts of CPU trainers do, and the sum of all parts
is divided by those (ps_server/coordination/steps.py). Pushed on arrival, it is divided by its own number.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from ctr_ps.protos.errors import AbortedError, CtrPsError
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.role import HeterRole, address_to_bind, default_bind
from ctr_ps.protos.store import Store
from ctr_ps.protos.wire.heter import Attend
from ctr_ps.protos.wire.security.credentials import Credentials, require_protection
from ctr_ps.ps_worker.cluster.open_store import open_store
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator
from ctr_ps.ps_worker.extras.chaos import faults_of
from ctr_ps.ps_worker.extras.heter.connect import require_heter, takes_over
from ctr_ps.ps_worker.extras.heter.dense_part import DensePart
from ctr_ps.ps_worker.extras.heter.inbox import Inbox, Joining, Waiting
from ctr_ps.ps_worker.extras.heter.service import HeterService
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, errors_of_model, trained_model
from ctr_ps.ps_worker.run.plan import ModelPlan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.termination import EXIT_CODE, Termination

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Without work it looks so often who has left, and whether the job has ended."""


def run_heter(plan: ModelPlan) -> dict[str, Any]:
    """Trains by a plan with the servers of its role, up to SIGTERM; see `train_heter`."""
    role = plan.role
    assert isinstance(role, HeterRole), "its callers check the role"
    with (
        Termination() as termination,
        open_store(role, plan.job.cluster, disturb=faults_of(os.environ)) as store,
    ):
        return train_heter(
            plan,
            store,
            host=default_bind(role.endpoint),
            on_joined=lambda run: run.end_by(termination),
            is_told_to_end=lambda: termination.is_told_to_end,
        )


def train_heter(
    plan: ModelPlan,
    store: Store,
    *,
    host: str,
    on_joined: Callable[[Run], None] = lambda _: None,
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Trains the dense part of a module of PyTorch until all CPU trainers have left; returns figures.

    It serves at `host`, with the port of its role, and calls `on_joined` once it has its place in the job.

    Raises:
        SystemExit: With the exit code of SIGTERM, if it was told to end before: the job goes on.
        CtrPsError: If anything goes wrong; says what.
    """
    job, model, role = plan.job, plan.model, plan.role
    assert isinstance(role, HeterRole), "as above"
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
        served = [
            worker
            for worker in range(role.num_workers)
            if takes_over(job) or worker % len(role.heter_endpoints) == role.heter_index
        ]
        inbox = Inbox(
            Joining(served, is_sync=job.strategy.is_sync, max_joined=job.heter.max_joined),
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
        figures = _train(run, part, inbox, is_told_to_end)
        if is_told_to_end():
            run.end_early()
            raise SystemExit(EXIT_CODE)
        run.leave()
    return figures


def _train(
    run: Run, part: DensePart, inbox: Inbox, is_told_to_end: Callable[[], bool]
) -> dict[str, Any]:
    """Trains until those that it serves have left, or it is told to end; returns figures.

    Calls that wait get the error that ends the job, too, and hear of any other error.
    """
    communicator = run.communicator
    assert isinstance(communicator, HalfAsyncCommunicator), "modes are checked above"
    figures = {"examples": 0, "batches": 0, "steps": 0}
    try:
        while not is_told_to_end():
            match inbox.next(LOOK_S):
                case None:
                    # That version is there since the start; raises if the job has ended.
                    run.store.wait_version(0).result()
                    if not inbox.remove(run.store.status().left):
                        break
                case Attend() as barrier:
                    run.attend(barrier.name, size=barrier.size, op=barrier.op)
                case batches:
                    figures["examples"] += _step(part, communicator, batches)
                    figures["batches"] += len(batches)
                    figures["steps"] += 1
    except CtrPsError as error:
        inbox.fail(error)
        raise
    except Exception as error:  # of the user's module: any kind
        inbox.fail(AbortedError(f"a heter trainer failed: {type(error).__name__}: {error}"))
        raise
    return figures


def _step(part: DensePart, communicator: HalfAsyncCommunicator, batches: Sequence[Waiting]) -> int:
    """Trains on joined batches in one forward and backward pass; returns the number of examples."""
    with communicator.params() as params:
        grad, examples, answers = part.train(params, [each.batch for each in batches])
    for waiting, answer in zip(batches, answers, strict=True):
        waiting.answer.set_result(answer)  # before the push, which they need not wait for
    dense = {DENSE_BLOCK: DenseGrad(grad, examples)} if examples else {}
    communicator.push(Gradients(dense=dense), examples=0, pulled=communicator.pulled, numbers=())
    return examples
