"""A worker's way to the heter trainers of its job: a job that they can train, its half of the model, calls.

worker w --> heter trainer w % H --lost--> the next one, asynchronously; else an error that names it
"""

import logging
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model, StepResult, Workspace
from ctr_ps.ctr_model.parameters import EmbeddingTable, Floats, Lookup, ModelInputError, Segment
from ctr_ps.protos.errors import TransportError, UsageError, counted
from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.limits import MAX_NUMBERS_BYTES
from ctr_ps.protos.store import Member, ReduceOp
from ctr_ps.protos.wire.heter import (
    ATTEND,
    HETER_CALLS,
    TRAIN,
    Attend,
    LayerOutputs,
    Train,
    Trained,
)
from ctr_ps.ps_worker.cluster.slow_calls import BUDGET_S
from ctr_ps.ps_worker.cluster.transport import Transport
from ctr_ps.ps_worker.extras.heter.dense_part import module_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import ModelPlan

if TYPE_CHECKING:
    from ctr_ps.ctr_model.torch.halves import FrontHalf

logger = logging.getLogger(__name__)

P = TypeVar("P", bound=ModelPlan)

_MODES = ("sync", "half_async", "async")
_RETRY_SHARE = 1 / 3
"""Of a lease: the error that names a heter trainer comes before servers end the job since they lost it.

They hear of it every third of a lease (ps_worker/run/membership.py), so they lose it no sooner than two
thirds after its end: a third is left for the error to reach them."""


def require_heter(job: Job, model: Model) -> None:
    """Refuses what heter trainers cannot train.

    Raises:
        JobError: Names the key of the job.
    """
    with job.errors("model.name", UsageError):
        module = module_of(model)
    if job.strategy.mode not in _MODES:
        raise job.error(
            "strategy.mode",
            f"strategy.mode is {job.strategy.mode!r}, expected one of {', '.join(_MODES)} with heter "
            "trainers",
        )
    if job.cluster.on_worker_loss == "wait":
        raise job.error(
            "cluster.on_worker_loss",
            'cluster.on_worker_loss is "wait", but in a job with heter trainers lost processes cannot be '
            'replaced: set "fail" or "continue"',
        )
    if job.strategy.is_sync and job.train.thread_num > 1:
        raise job.error(
            "train.thread_num",
            f"train.thread_num is {job.train.thread_num}, but with heter trainers each CPU trainer adds one "
            "batch to a synchronous step: set it to 1 and start more CPU trainers",
        )
    if job.train.clip_norm:
        raise job.error(
            "train.clip_norm",
            f"train.clip_norm is {job.train.clip_norm:g}, but with heter trainers no process has the whole "
            "gradient of a batch, of rows and dense parameters: remove it, and lower the learning rates or "
            "set a warm-up ([optimizer.schedule])",
        )
    if module.schema.weight is not None:
        raise job.error(
            "data.schema",
            f"the schema has the weight {module.schema.weight!r}, but heter trainers do not support sample "
            "weights: remove 'weight' from the schema, or train without heter trainers",
        )
    if job.data.negative_correction == "weight":
        raise job.error(
            "data.negative_correction",
            'data.negative_correction is "weight", but heter trainers do not support sample weights: set '
            '"logit"',
        )
    if job.data.shuffle == "global":
        raise job.error(
            "data.shuffle",
            'data.shuffle is "global", but heter trainers take no part in a global shuffle: set "local"',
        )


class HeterTrainers:
    """Calls the heter trainers for one worker. Thread-safe."""

    def __init__(self, transport: Transport, *, worker: int, takes_over: bool) -> None:
        """Uses `transport`, whose servers are the heter trainers, and closes it in the end.

        `takes_over`: another one takes over from one that is lost.
        """
        self._transport = transport
        self._takes_over = takes_over
        self._member = Member(worker, secrets.randbits(63))
        num_heter = len(transport.shard_map.endpoints)
        # The first one serves this worker, unless it is lost.
        self._alive = [(worker + i) % num_heter for i in range(num_heter)]
        self._next_number = 0
        self._unsettled: set[int] = set()
        self._lock = threading.Lock()

    def train(self, dense: Values, labels: Values, outputs: LayerOutputs) -> Trained:
        """Has a batch trained on behind the cut; see `protos.wire.heter.Train`.

        Raises:
            TransportError: If a heter trainer is lost, and none takes over; names it.
            UsageError: If the batch does not fit a message.
        """
        _require_size(dense, outputs)
        with self._lock:
            number = self._next_number
            self._next_number += 1
            self._unsettled.add(number)
            settled = min(self._unsettled)
        batch = Train(
            member=self._member,
            number=number,
            settled=settled,
            dense=dense,
            labels=labels,
            outputs=outputs,
        )
        try:
            while True:
                with self._lock:
                    heter = self._alive[0]
                try:
                    return self._transport.call(heter, TRAIN, batch).result()
                except TransportError as error:
                    self._lose(heter, error)
        finally:
            with self._lock:
                self._unsettled.discard(number)

    def attend(self, number: int, name: str, *, size: int = 0, op: ReduceOp | None = None) -> None:
        """Tells of barrier `number` of the job; this worker comes to it when all its batches are trained on.

        In an all-reduce each member brings `size` numbers, which are reduced by `op`. Raises as `train` does.
        """
        barrier = Attend(member=self._member, number=number, name=name, size=size, op=op)
        # Where one may take over from another, each waits for all workers (inbox.py).
        with self._lock:
            told = self._alive if self._takes_over else self._alive[:1]
        calls: list[tuple[int, Future[None]]] = [
            (heter, self._transport.call(heter, ATTEND, barrier)) for heter in told
        ]
        for heter, call in calls:
            try:
                call.result()
            except TransportError as error:
                self._lose(heter, error)

    def close(self) -> None:
        """Ends the connections; calls that are on their way fail."""
        self._transport.close()

    def _lose(self, heter: int, error: TransportError) -> None:
        """A heter trainer does not answer; raises unless another one takes over."""
        endpoint = self._transport.shard_map.endpoints[heter]
        lost = f"heter trainer {heter} ({endpoint}) is lost"
        with self._lock:
            others = [each for each in self._alive if each != heter]
            if self._takes_over and others:
                is_new, self._alive = len(others) < len(self._alive), others
                if is_new:
                    logger.warning("%s, heter trainer %d takes over: %s", lost, others[0], error)
                return
        why = (
            "there is no other heter trainer"
            if len(self._transport.shard_map.endpoints) == 1 or (self._takes_over and not others)
            else "another heter trainer takes over only in asynchronous modes with "
            'cluster.on_worker_loss = "continue"'
        )
        raise TransportError(
            f"{lost}, and {why}. See the log of heter trainer {heter}, and start the job again from the "
            f"job's checkpoint; {error}"
        ) from error


def _require_size(dense: Values, outputs: LayerOutputs) -> None:
    size = dense.nbytes + sum(each.nbytes for of in outputs.values() for each in of)
    if size > MAX_NUMBERS_BYTES:
        largest = max(outputs, key=lambda name: sum(each.nbytes for each in outputs[name]))
        raise UsageError(
            f"a batch of {counted(len(dense), 'example')} sends {size} bytes to a heter trainer, mostly "
            f"the output of {largest}; a message has at most {MAX_NUMBERS_BYTES}: lower "
            "train.batch_size, or write a Front that returns less (docs/heterogeneous.md)"
        )


class FrontModel:
    """A `Model` that trains without dense parameters: heter trainers have them. It does not predict."""

    segments: tuple[Segment, ...] = ()
    num_params = 0

    def __init__(self, model: Model, trainers: HeterTrainers) -> None:
        """Cuts the model; raises UsageError if it cannot be cut."""
        self._model = module_of(model)
        self._trainers = trainers
        self.tables: tuple[EmbeddingTable, ...] = model.tables
        self.workspace(1)

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns the layers before the cut for one thread; see `Model`."""
        from ctr_ps.ctr_model.torch.halves import FrontHalf

        try:
            return _Workspace(FrontHalf(self._model))
        except ValueError as error:
            raise UsageError(f"the model cannot be divided for heter trainers: {error}") from error

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Raises ModelInputError: evaluation takes the whole model."""
        raise ModelInputError("half a model cannot predict: use the whole model")

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        """Computes the gradients of the rows; a heter trainer those of the dense parameters. See `Model`.

        Raises UsageError if the examples have weights, and as `HeterTrainers.train` does.
        """
        if not isinstance(workspace, _Workspace):
            raise ModelInputError("the workspace belongs to another model")
        if batch.weights is not None:
            raise UsageError(
                "heter trainers do not support sample weights: give batches without weights, or train "
                "without heter trainers"
            )
        step = workspace.front.forward(batch, lookups)
        sent = step.activations
        answer = self._trainers.train(sent.dense, sent.labels, sent.outputs)
        step.backward(answer.grads, sparse_grads)
        return StepResult(answer.loss, answer.probabilities)


class _Workspace:
    """The layers before the cut, for one thread."""

    max_batch_size = sys.maxsize

    def __init__(self, front: "FrontHalf") -> None:
        self.front = front


def takes_over(job: Job) -> bool:
    """Whether a heter trainer takes over from one that is lost.

    Not synchronously: it may have pushed its part of the step that the lost one was at.
    """
    return job.cluster.on_worker_loss == "continue" and not job.strategy.is_sync


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
    )
    return HeterTrainers(transport, worker=worker, takes_over=takes_over(job))


def before_the_cut(plan: P, heter: HeterTrainers | None) -> P:
    """Returns the plan of a worker that trains the layers before the cut, and `heter` the others.

    Raises UsageError if the model cannot be cut.
    """
    return plan if heter is None else replace(plan, trained=FrontModel(plan.trained, heter))
