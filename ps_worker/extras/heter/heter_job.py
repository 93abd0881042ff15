"""A heter trainer's part of a training job, from its plan to its figures.

    bind -> join, declare -> serve -> start -> train until all CPU trainers have left -> leave

    next --batches--> parameters -> forward, backward -> answers -> push, synchronously as a part of the step
      |  --barrier--> come to it as well
      `--nothing----> who has left? Is the job still there?

As a part of a synchronous step it counts no examples: the parts of CPU trainers do, and the sum of all parts
is divided by those (ps_server/coordination/steps.py). Pushed on arrival, it is divided by its own number.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ctr_ps.protos.errors import AbortedError, CtrPsError, TransportError
from ctr_ps.protos.gradients import DenseGrad, Gradients
from ctr_ps.protos.role import HeterRole, address_to_bind, default_bind
from ctr_ps.protos.store import Store
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.channel import server_options
from ctr_ps.protos.wire.grpc_status import details_of, metadata_of, status_of
from ctr_ps.protos.wire.heter import ATTEND, HETER_CALLS, TRAIN, Attend
from ctr_ps.protos.wire.security.authorization import Authority, Authorization
from ctr_ps.protos.wire.security.credentials import Credentials, bind, require_protection
from ctr_ps.ps_worker.cluster.open_store import open_store
from ctr_ps.ps_worker.communicators.communicator import StepPush
from ctr_ps.ps_worker.communicators.lockstep import HalfAsyncCommunicator
from ctr_ps.ps_worker.extras.heter.connect import require_heter, takes_over
from ctr_ps.ps_worker.extras.heter.dense_part import DensePart
from ctr_ps.ps_worker.extras.heter.inbox import Inbox, Joining, Waiting
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, errors_of_model, trained_model
from ctr_ps.ps_worker.run.plan import ModelPlan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.termination import EXIT_CODE, Termination

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Without work it looks so often who has left, and whether the job has ended."""

MAX_CALLS = 256
"""Batches that wait, each with a request of up to 16 MiB; more would be training threads of CPU trainers."""

GRACE_S = 1.0
"""For answers that are on their way when the service ends."""


def run_heter(plan: ModelPlan) -> dict[str, Any]:
    """Trains by a plan with the servers of its role, up to SIGTERM; see `train_heter`."""
    role = plan.role
    assert isinstance(role, HeterRole), "its callers check the role"
    with (
        Termination() as termination,
        open_store(role, plan.job.cluster) as store,
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
    communicator.push(StepPush(Gradients(dense=dense), 0, communicator.pulled, numbers=()))
    return examples


class HeterService(AbstractContextManager["HeterService"]):
    """Serves from `start` to `close`: a gRPC method for each call of protos/wire/heter.py.

    For the thread that trains. Each call has a thread while it waits. A thread of a CPU trainer sends no
    batch before it has the answer to the one before; calls beyond `MAX_CALLS` are refused.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Binds "host:port", 0: a free port; without credentials it serves whoever calls, without TLS."""
        credentials = credentials or Credentials()
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, "heter-calls"),
            options=server_options(),
            interceptors=[Authorization(Authority(credentials, HETER_CALLS.values()))]
            if credentials.tell_callers_apart
            else [],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self._inbox: Inbox | None = None
        self.port = bind(self._server, address, credentials)

    def start(self, inbox: Inbox) -> None:
        """Has `inbox` answer the calls."""
        self._inbox = inbox
        answers: Mapping[Call[Any, Any], Callable[[Any], Any]] = {
            TRAIN: inbox.train,
            ATTEND: inbox.attend,
        }
        methods = {
            call.name: grpc.unary_unary_rpc_method_handler(_method(call, answer))
            for call, answer in answers.items()
        }
        handler = grpc.method_handlers_generic_handler(TRAIN.service, methods)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuses new calls, lets those that are answered end, cuts off the others, and frees the port."""
        self._server.stop(GRACE_S).wait()
        if self._inbox is not None:  # the process ends when the threads of calls do
            self._inbox.fail(TransportError("the heter trainer has ended"))


def _method(call: Call[Any, Any], answer: Callable[[Any], Any]) -> Callable[[bytes, Any], Any]:
    """Returns the method of a call: the bytes of a message in, those of a message out."""

    def method(request: bytes, context: grpc.ServicerContext) -> Any:
        try:
            return call.answer.encode(answer(call.request.decode(request)))
        except CtrPsError as error:
            context.set_trailing_metadata(metadata_of(error))
            context.abort(status_of(error), details_of(error))
        except Exception:
            logger.exception("call failed call=%s", call.name)
            context.abort(
                grpc.StatusCode.INTERNAL,
                f"the heter trainer failed in {call.name}: see its log",
            )

    return method
