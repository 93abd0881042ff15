"""A worker's part in a run, from `fleet.init_worker()` to `fleet.stop_worker()`.

Workers meet for the first time when they train. Until then worker 0 may load a model, and all train on from
that one; later it could not, since in some modes each worker keeps parameters of its own.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctr_model.batch import Batch
from ctr_model.metrics import ClickMetrics
from ctr_model.models.model import Model
from ctr_model.models.origin import origin_of
from ctr_model.registry import name_of
from protos.errors import UsageError
from protos.role import WorkerRole
from protos.store import InferenceSettings, Numbers, ReduceOp, SaveRequest, Shrunk, Staleness, Store
from ps_server.checkpoint.reader import Checkpoint
from ps_server.store import ParameterStore
from ps_worker.checkpoints.attachments import attachments_of
from ps_worker.cluster.client import ClusterClient
from ps_worker.cluster.connect import connect
from ps_worker.cluster.grpc_transport import Deadlines
from ps_worker.data.blocks.position import DataPosition
from ps_worker.data.memory.peers import Peers
from ps_worker.job import Job
from ps_worker.job.sections.section import ModelSection
from ps_worker.job.specs import declare
from ps_worker.run.precompile import precompile_model
from ps_worker.training.evaluator import OnPredictions, evaluate
from ps_worker.training.monitor import FetchHandler, Fetching
from ps_worker.training.shrinking import log_shrunk
from ps_worker.training.trainer import TrainedStep
from ps_worker.training.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained, and how.

    Attributes:
        model: What to train.
        job: How; its sections [train], [optimizer], [life], [strategy] and [cluster] count.
    """

    model: Model
    job: Job


class WorkerRun:
    """One worker on its store. For one thread."""

    def __init__(self, role: WorkerRole, task: Task) -> None:
        """Waits for the servers and declares the model; without servers, makes a store in this process.

        Raises:
            CtrPsError: If servers do not answer, or hold something else.
        """
        self._role = role
        self._task = task
        self._worker: Worker | None = None
        self._num_barriers = 0
        origin = origin_of(task.model)
        if origin is not None:  # a class of one's own may not say for which columns it is
            precompile_model(task.model, origin.schema, task.job)
        self._store = _store_of(role, task.job)
        try:
            declare(self._store, task.model, task.job)
        except BaseException:
            self._close_store()
            raise

    def train(
        self,
        batches: Iterable[Batch],
        *,
        thread_num: int = 1,
        fetch_handler: FetchHandler | None = None,
        fetch_period_s: float,
    ) -> None:
        """Trains on each batch once; a handler hears how it goes."""
        worker = self._training()
        if fetch_handler is None:
            worker.train(batches, thread_num=thread_num)
        else:
            with Fetching(
                fetch_handler,
                period_s=fetch_period_s,
                progress=worker.progress,
                staleness=self._staleness,
            ) as fetching:
                worker.train(fetching.watch(batches), thread_num=thread_num)
        worker.progress.log()

    def steps(self, batches: Iterable[Batch]) -> Iterator[TrainedStep]:
        """Trains on each batch once, and yields after each."""
        return self._training().steps(batches)

    def evaluate(
        self, batches: Iterable[Batch], on_predictions: OnPredictions | None
    ) -> ClickMetrics:
        """Predicts with what all workers have learnt so far; see `ps_worker.training.evaluator.evaluate`."""
        self._flush()
        return evaluate(
            self._store,
            self._task.model,
            batches,
            batch_size=self._task.job.train.batch_size,
            on_predictions=on_predictions,
        )

    def barrier(self) -> None:
        """Waits until every worker has come as often as this one."""
        name = self._next_barrier()
        if self._worker is not None:
            self._worker.barrier(name)
        else:
            self._store.barrier(name, self._role.worker_index, step=0).result()

    def all_reduce(self, values: Numbers, op: ReduceOp) -> Numbers:
        """Returns the sum, largest or smallest of all workers' `values` float64[N].

        Workers that have left bring nothing; of a sum it is said if there are some.
        """
        if op is not ReduceOp.SUM:
            return self._reduced(values, op)
        *_, num_brought = reduced = self._reduced(np.append(values, 1.0), op)
        if num_brought < self._role.num_workers:
            logger.warning(
                "a sum of numbers of %d workers only: the other %d have left",
                num_brought,
                self._role.num_workers - num_brought,
            )
        return reduced[:-1]

    @property
    def peers(self) -> Peers:
        """This worker's way to the others."""
        return Peers(self._store, self._role.worker_index, self._role.num_workers, self.all_reduce)

    def save(self, url: str) -> None:
        """Saves all that the servers hold; no other worker takes part."""
        self._flush()
        if self._worker is not None:
            self._worker.settle()
        self._store.save(SaveRequest(url=url, attachments=_attachments(self._task)))

    def save_inference(self, url: str, settings: InferenceSettings) -> None:
        """Saves what predictions need; no other worker takes part."""
        self._flush()
        if self._worker is not None:
            self._worker.settle()
        self._store.save(
            SaveRequest(url=url, attachments=_attachments(self._task), inference=settings)
        )

    def shrink(self, threshold: float | None, *, dry_run: bool) -> Mapping[str, Shrunk]:
        """Ends a pass; what has expired goes, and what has a norm up to `threshold`; see `Store.shrink`."""
        self._flush()
        shrunk = self._store.shrink(max_norm=threshold, dry_run=dry_run)
        if not dry_run:
            log_shrunk(shrunk)
        return shrunk

    def load(self, url: str, *, only: Sequence[str], resume: bool) -> None:
        """Replaces what the servers hold by what is named, or all, of a checkpoint.

        With `resume` workers learn where in their data they were.

        Raises:
            UsageError: If training has begun.
            CheckpointError: If there is none, or it does not fit.
        """
        if self._worker is not None:
            raise UsageError(
                "fleet.load_model() comes before training: workers have parameters of their own by now"
            )
        checkpoint = Checkpoint.open(url)
        self._store.load(checkpoint.url, only=only, token=checkpoint.token)
        if resume:
            self._store.resume(checkpoint.manifest.version, checkpoint.manifest.workers)

    def data_position(self) -> DataPosition | None:
        """Returns where in its data this worker was; meets the others."""
        earlier = self._training().earlier_progress
        return DataPosition.from_json(earlier.position) if earlier and earlier.position else None

    def leave(self) -> None:
        """Says that this worker has nothing more to do, when the servers have all that it has learnt."""
        try:
            if self._worker is not None:
                self._worker.leave()
            else:
                self._store.leave(self._role.worker_index, step=0)
        finally:
            self.close()

    def close(self) -> None:
        """Ends what runs in the background, and the connection; the others are told nothing."""
        if self._worker is not None:
            self._worker.close()
        self._close_store()

    def _training(self) -> Worker:
        """Returns what trains; the first call waits until all workers have come so far."""
        if self._worker is None:
            self._worker = Worker(
                self._store,
                self._task.model,
                self._task.job,
                index=self._role.worker_index,
                num_workers=self._role.num_workers,
                is_in_process=_is_in_process(self._role),
            )
        return self._worker

    def _flush(self) -> None:
        if self._worker is not None:
            self._worker.flush()

    def _reduced(self, values: Numbers, op: ReduceOp) -> Numbers:
        name = self._next_barrier()
        if self._worker is not None:
            return self._worker.all_reduce(name, values, op).copy()  # writable
        answer = self._store.all_reduce(name, self._role.worker_index, values, op, step=0)
        return answer.result().values.copy()

    def _next_barrier(self) -> str:
        self._num_barriers += 1
        return f"meeting-{self._num_barriers}"

    def _staleness(self) -> Staleness:
        return self._store.status().staleness

    def _close_store(self) -> None:
        if isinstance(self._store, ClusterClient):
            self._store.close()


def _is_in_process(role: WorkerRole) -> bool:
    return not role.endpoints


def _store_of(role: WorkerRole, job: Job) -> Store:
    limits = job.cluster
    if _is_in_process(role):
        return ParameterStore(wait_limit_s=limits.wait_timeout_s)
    return connect(
        role.endpoints,
        connect_timeout_s=limits.connect_timeout_s,
        deadlines=Deadlines(rpc_s=limits.rpc_timeout_s, wait_s=limits.wait_timeout_s),
    )


def _attachments(task: Task) -> dict[str, bytes]:
    """Returns what `ps-worker infer` reads; nothing for a model that does not say what it was built of."""
    origin, name = origin_of(task.model), name_of(task.model)
    if origin is None or name is None:
        return {}
    section = ModelSection.model_validate({"name": name, **origin.options})
    return attachments_of(task.job.model_copy(update={"model": section}), origin.schema)
