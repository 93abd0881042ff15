"""One worker of a training run, on a store that is there already.

    declare -> load -> barrier -> | train, steps, evaluate, save, meet, all_reduce, in any order | -> done

What a job file (ps_worker/run/run.py) and a script (ps_worker/fleet) have in common. Worker 0 loads, others
wait for it; all else that workers do together, they do by calling `barrier` or `all_reduce`.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from ctr_model.batch import Batch
from ctr_model.metrics import ClickMetrics
from ctr_model.models.model import Model
from protos.errors import JobError
from protos.store import Numbers, ReduceOp, SaveRequest, Store, Version
from ps_worker.checkpoints.resume import EarlierRun
from ps_worker.checkpoints.warm_start import warm_start
from ps_worker.communicators.choice import communicator_of
from ps_worker.data.blocks.position import Batches
from ps_worker.data.memory.peers import Peers
from ps_worker.job import Job
from ps_worker.job.specs import counting_tables, declare
from ps_worker.training.evaluator import OnPredictions, evaluate
from ps_worker.training.meter import Progress
from ps_worker.training.trainer import TrainedStep, Trainer

logger = logging.getLogger(__name__)


class Worker:
    """Trains, evaluates and saves one model; leaving the `with` block ends what runs in the background.

    Attributes:
        store: The parameters.
        index: Which of the workers this is.
        num_workers: Workers of the run.
        progress: Of this worker's training.
        earlier_progress: What the parameters had of this worker's training at the start; None: nothing.
    """

    def __init__(
        self,
        store: Store,
        model: Model,
        job: Job,
        *,
        index: int = 0,
        num_workers: int = 1,
        is_in_process: bool = True,
        load: str = "",
        only: Sequence[str] = (),
        earlier_run: EarlierRun | None = None,
        agreement: str = "",
    ) -> None:
        """Declares the model, has worker 0 load a checkpoint, and meets the other workers.

        Args:
            store: The parameters.
            model: What to train.
            job: How; of its sections [train], [optimizer], [life], [strategy] and [cluster] count.
            index: Which of the workers this is.
            num_workers: Workers of the run.
            is_in_process: The store is in this process.
            load: Checkpoint to start from; empty: from what the store holds.
            only: What to take of `load`, as `Store.load`.
            earlier_run: A run to go on with: worker 0 loads its checkpoint, instead of `load`, and all count
                on from there; the others need not know it.
            agreement: A text that must be the same for all workers, besides the parameters' declarations.

        Raises:
            JobError: If workers do not agree.
            CtrPsError: If store and job do not fit, the checkpoint is none, or others do not come.
        """
        self.store = store
        self.index = index
        self.num_workers = num_workers
        self.progress = Progress(every_s=job.train.log_every_s)
        self._num_reductions = 0
        self._model = model
        self._job = job
        declare(store, model, job)
        if self.is_first:
            self._load(load, only, earlier_run)
        version = self._agree(agreement)
        self._communicator = communicator_of(
            job, store, model, worker=index, num_workers=num_workers, is_in_process=is_in_process
        )
        self._communicator.rejoin(version)
        self._resume()

    def _load(self, load: str, only: Sequence[str], earlier_run: EarlierRun | None) -> None:
        if earlier_run is not None:
            self.store.load(earlier_run.url, token=earlier_run.token)
            self.store.resume(earlier_run.version, earlier_run.progress)
            logger.info("goes on from %s version=%d", earlier_run.url, earlier_run.version)
        elif load:
            self.store.load(load, only=only)
            start = warm_start(load, self._model, only)
            logger.info(
                "loaded %s taken=%s anew=%s", load, ",".join(start.taken), ",".join(start.fresh)
            )

    def _resume(self) -> None:
        """Counts on from what the store has of this worker: nothing, unless worker 0 had it go on."""
        self.earlier_progress = self.store.status().progress.get(self.index)
        if self.earlier_progress is not None:
            self._communicator.push_ids.resume(self.earlier_progress)
            self.progress.resume(self.earlier_progress.step)

    def _agree(self, agreement: str) -> Version:
        """Meets the other workers, and returns the version at which all go on."""
        digest = hashlib.sha256(agreement.encode()).digest()
        number = float(int.from_bytes(digest[:6], "little"))  # exact in a float64
        numbers = np.array([number, -number])
        reduced = self.store.all_reduce("start", self.index, numbers, ReduceOp.MAX, step=0).result()
        if not np.array_equal(reduced.values, numbers):
            raise JobError(
                f"worker {self.index} does not run the same job as others: [model], [strategy], "
                f"train.epochs, data.shuffle, checkpoint.resume or the data's schema differ; give every "
                f"worker the same job and --set"
            )
        return reduced.version

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, which does what one has to do for all."""
        return self.index == 0

    def train(
        self,
        batches: Batches,
        *,
        thread_num: int | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        """Trains on each batch once; `thread_num` overrides the job's. See `Trainer.train`."""
        self._trainer(thread_num or self._job.train.thread_num).train(batches, after_step)

    def steps(self, batches: Batches) -> Iterator[TrainedStep]:
        """Trains on each batch once, and yields after each; see `Trainer.steps`."""
        return self._trainer(thread_num=1).steps(batches)

    def evaluate(
        self, batches: Iterable[Batch], *, on_predictions: OnPredictions | None = None
    ) -> ClickMetrics:
        """Predicts with the store's parameters as they are; see `ps_worker.training.evaluator.evaluate`."""
        return evaluate(
            self.store,
            self._model,
            batches,
            batch_size=self._job.train.batch_size,
            on_predictions=on_predictions,
        )

    def settle(self) -> None:
        """Returns when the servers have all steps that this worker took part in.

        In synchronous training they stand still then, all at one version, until it takes the next step.
        """
        self.store.wait_version(self._communicator.version).result()

    def flush(self) -> None:
        """Returns when the store has all that this worker has learnt."""
        self._communicator.flush()

    def barrier(self, name: str) -> None:
        """Waits at the barrier `name` until every worker has come; what each has learnt is on the servers."""
        self._communicator.flush()
        answer = self.store.barrier(name, self.index, step=self._communicator.version)
        self._communicator.rejoin(answer.result())

    def all_reduce(self, name: str, values: Numbers, op: ReduceOp) -> Numbers:
        """Returns the sum, largest or smallest of all workers' `values` float64[N]; all of them must call."""
        self._communicator.flush()
        reduced = self.store.all_reduce(
            name, self.index, values, op, step=self._communicator.version
        ).result()
        self._communicator.rejoin(reduced.version)
        return reduced.values

    def peers(self) -> Peers:
        """Returns this worker's way to the others, for what all do together beside training."""

        def all_reduce(values: Numbers, op: ReduceOp) -> Numbers:
            self._num_reductions += 1
            return self.all_reduce(f"peers-{self._num_reductions}", values, op)

        return Peers(self.store, self.index, self.num_workers, all_reduce)

    def save(self, url: str, attachments: Mapping[str, bytes]) -> str:
        """Saves all that the store holds, alone; see `Store.save`."""
        return self.store.save(SaveRequest(url=url, attachments=attachments))

    def leave(self) -> None:
        """Says that this worker has left for good, when nothing of it is on its way any more."""
        self._communicator.flush()
        self.close()
        self.store.leave(self.index, step=self._communicator.version)

    def close(self) -> None:
        """Stops what runs in the background; what was not sent is lost."""
        self._communicator.close()

    def _trainer(self, thread_num: int) -> Trainer:
        return Trainer(
            self._model,
            self._communicator,
            batch_size=self._job.train.batch_size,
            thread_num=thread_num,
            progress=self.progress,
            counting_tables=counting_tables(self._model, self._job),
        )
