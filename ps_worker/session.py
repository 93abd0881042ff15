"""One worker's part of a training job, from the first declaration to the last figure.

    declare -> load -> | pass over the data -> flush -> barrier -> save | x epochs -> evaluate -> done

Worker 0 loads, saves and evaluates; the others meet it at barriers. An embedded run is the same with one
worker and a store in this process.
"""

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ctr_model.metrics import ClickMetrics
from ctr_model.models.model import Model
from ctr_model.registry import build_model
from ctr_model.schema import Schema
from protos.errors import JobError, SpecConflictError
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, TableSpec
from protos.store import Store
from ps_server.checkpoint.publish import require_writable, write_latest
from ps_server.optimizers.registry import hyper_of, optimizer_of
from ps_worker.communicators.asynchronous import AsyncCommunicator
from ps_worker.communicators.communicator import DENSE_BLOCK, Communicator
from ps_worker.communicators.direct import DirectCommunicator
from ps_worker.communicators.synchronous import SyncCommunicator
from ps_worker.data.criteo import CriteoReader
from ps_worker.data.files import files_of_worker, matching_files
from ps_worker.evaluator import evaluate
from ps_worker.job import Job
from ps_worker.progress import Progress
from ps_worker.trainer import Trainer

logger = logging.getLogger(__name__)

JOB_ATTACHMENT = "job.json"
SCHEMA_ATTACHMENT = "schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run reports at its end; figures of evaluation are those of worker 0, None elsewhere.

    Attributes:
        auc: Area under the ROC curve on the test data.
        log_loss: Mean on the test data.
        accuracy: At threshold 0.5, on the test data.
        calibration: Predicted clicks over actual clicks, on the test data.
        test_examples: Rows evaluated.
        examples: Examples trained on, over all workers.
        examples_per_s: Of all workers, while training: without loading, saving and evaluating.
        train_loss: Mean over this worker's examples, each predicted before it was learnt.
        bad_rows: Malformed rows that this worker skips in an epoch.
        model_digest: SHA-256 of the trained model.
        checkpoint: Folder of the last checkpoint.
    """

    auc: float | None = None
    log_loss: float | None = None
    accuracy: float | None = None
    calibration: float | None = None
    test_examples: int = 0
    examples: int = 0
    examples_per_s: float = 0.0
    train_loss: float | None = None
    bad_rows: int = 0
    model_digest: str | None = None
    checkpoint: str | None = None

    def as_json(self) -> dict[str, object]:
        """Returns the fields; what is not a number is None, as JSON has no NaN."""
        return {name: _or_none(value) for name, value in asdict(self).items()}


def _or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job that was checked against all that a worker can see before it meets others.

    Attributes:
        job: What to do.
        schema: The columns of its data.
        model: For these columns.
        train_files: Of all workers.
        test_files: Evaluated after training; empty: no evaluation.
    """

    job: Job
    schema: Schema
    model: Model
    train_files: list[Path]
    test_files: list[Path]


def plan_of(job: Job) -> Plan:
    """Returns the job with its schema, model and files.

    Raises:
        JobError: If schema, model or optimizers are wrong.
        DataError: If a pattern matches no file.
    """
    schema = _schema_of(job)
    _check_optimizers(job)
    return Plan(
        job=job,
        schema=schema,
        model=model_of(job, schema),
        train_files=matching_files(job.data.train),
        test_files=matching_files(job.data.test),
    )


def _schema_of(job: Job) -> Schema:
    try:
        return Schema.load(job.data.schema_source)
    except ValueError as error:
        raise JobError(f"[data] schema: {error}") from error


def model_of(job: Job, schema: Schema) -> Model:
    """Returns the model that a job names, for the columns of a schema.

    Raises:
        JobError: If there is no such model, or an option is wrong.
    """
    try:
        return build_model(job.model.name, schema, job.model.options)
    except ValueError as error:
        raise JobError(f"[model]: {error}") from error


def _check_optimizers(job: Job) -> None:
    dense = job.optimizer.dense.spec()
    try:
        hyper_of(job.optimizer.sparse.spec())
        hyper_of(dense)
    except SpecConflictError as error:
        raise JobError(f"[optimizer]: {error}") from error
    if not optimizer_of(dense).is_elementwise:
        raise JobError(f"[optimizer] dense: {dense.name!r} is for rows only")


def declare(store: Store, model: Model, job: Job) -> None:
    """Declares the model's tables and its dense block."""
    for table in model.tables:
        store.create_table(
            TableSpec(
                name=table.name,
                dim=table.dim,
                initializer=InitializerSpec(kind="uniform", scale=table.init_range),
                optimizer=job.optimizer.sparse.spec(),
                seed=job.train.seed,
            )
        )
    store.create_dense(
        DenseSpec(
            name=DENSE_BLOCK,
            segments=tuple(
                DenseSegment(
                    length=math.prod(segment.shape),
                    initializer=InitializerSpec(kind="normal", scale=segment.init_std),
                )
                for segment in model.segments
            ),
            optimizer=job.optimizer.dense.spec(),
            seed=job.train.seed,
        )
    )


def communicator_of(
    job: Job, store: Store, model: Model, *, worker: int, is_embedded: bool
) -> Communicator:
    """Returns the communicator of the job's mode."""
    if job.strategy.mode == "sync":
        return SyncCommunicator(store, worker=worker, num_params=model.num_params)
    if is_embedded:
        return DirectCommunicator(store, worker=worker, num_params=model.num_params)
    return AsyncCommunicator(
        store,
        worker=worker,
        num_params=model.num_params,
        max_merge_var_num=job.strategy.max_merge_var_num,
        max_merge_dense_num=job.strategy.max_merge_dense_num,
        send_queue_size=job.strategy.send_queue_size,
        max_delay_ms=job.strategy.max_delay_ms,
        stall_limit_s=job.cluster.wait_timeout_s,
    )


class Session:
    """Runs one worker of a job on a store that is there already."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        worker: int = 0,
        num_workers: int = 1,
        is_embedded: bool = True,
    ) -> None:
        """Deals this worker its files.

        Args:
            plan: What to do.
            store: The parameters.
            worker: Index of this worker.
            num_workers: Workers of the job.
            is_embedded: The store is in this process, and there is nothing to gain from sending in the
                background.
        """
        self._plan = plan
        self._job = plan.job
        self._store = store
        self._worker = worker
        self._is_embedded = is_embedded
        self._train_files = files_of_worker(plan.train_files, worker, num_workers)
        self._bad_rows = 0
        self._progress = Progress(every_s=plan.job.train.log_every_s)
        self._checkpoint: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this worker loads, saves and evaluates."""
        return self._worker == 0

    def run(self) -> Summary:
        """Trains, saves and evaluates; returns what came out of it."""
        logger.info("worker %d trains on %s", self._worker, _named(self._train_files))
        declare(self._store, self._plan.model, self._job)
        if self.is_first and self._job.checkpoint.dir:
            require_writable(self._job.checkpoint.dir)
        if self.is_first and self._job.checkpoint.load:
            self._store.load(self._job.checkpoint.load)
            logger.info("loaded %s", self._job.checkpoint.load)
        version = self._store.barrier("start", self._worker, step=0).result()
        communicator = communicator_of(
            self._job,
            self._store,
            self._plan.model,
            worker=self._worker,
            is_embedded=self._is_embedded,
        )
        communicator.rejoin(version)
        try:
            seconds = self._train(communicator)
        finally:
            communicator.close()
        summary = self._summary(seconds)
        self._store.done(self._worker, step=communicator.version)
        return summary

    def _train(self, communicator: Communicator) -> float:
        """Goes through the data `epochs` times; returns the seconds that all workers took for it."""
        trainer = Trainer(
            self._plan.model,
            communicator,
            batch_size=self._job.train.batch_size,
            thread_num=self._job.train.thread_num,
            progress=self._progress,
        )
        seconds = 0.0
        for epoch in range(1, self._job.train.epochs + 1):
            start = time.monotonic()
            reader = (
                self._new_reader()
            )  # a new one each time, or an epoch's bad rows add to the last's
            trainer.train(reader.batches(self._train_files))
            self._bad_rows = reader.bad_rows
            self._meet(f"epoch-{epoch}", communicator)
            seconds += time.monotonic() - start
            self._progress.log()
            self._save(f"epoch-{epoch}")
            if epoch < self._job.train.epochs:
                self._meet(f"saved-{epoch}", communicator)
        return seconds

    def _meet(self, name: str, communicator: Communicator) -> None:
        answer = self._store.barrier(name, self._worker, step=communicator.version)
        communicator.rejoin(answer.result())

    def _save(self, name: str) -> None:
        if not (self.is_first and self._job.checkpoint.dir):
            return
        root = Path(self._job.checkpoint.dir)
        attachments = {
            JOB_ATTACHMENT: self._job.to_json().encode(),
            SCHEMA_ATTACHMENT: json.dumps(self._plan.schema.to_dict(), indent=1).encode(),
        }
        self._store.save(str(root / name), attachments)
        write_latest(root, name)
        self._checkpoint = str(root / name)
        logger.info("saved %s", self._checkpoint)

    def _summary(self, seconds: float) -> Summary:
        own = Summary(train_loss=self._progress.mean_loss, bad_rows=self._bad_rows)
        if not self.is_first:
            return replace(own, examples=self._progress.examples)
        examples = sum(self._store.status().examples.values())
        return replace(
            own,
            **self._evaluation(),
            examples=examples,
            examples_per_s=examples / seconds,
            model_digest=self._store.digest(),
            checkpoint=self._checkpoint,
        )

    def _evaluation(self) -> dict[str, Any]:
        if not self._plan.test_files:
            return {}
        batches = self._new_reader().batches(self._plan.test_files)
        metrics = evaluate(
            self._store, self._plan.model, batches, batch_size=self._job.train.batch_size
        )
        return figures(metrics)

    def _new_reader(self) -> CriteoReader:
        return CriteoReader(
            self._plan.schema,
            batch_size=self._job.train.batch_size,
            bad_row_limit=self._job.data.bad_row_limit,
        )


def figures(metrics: ClickMetrics) -> dict[str, Any]:
    """Returns the figures of an evaluation, by their names in summaries."""
    return {
        "auc": metrics.auc(),
        "log_loss": metrics.log_loss(),
        "accuracy": metrics.accuracy(),
        "calibration": metrics.calibration(),
        "test_examples": metrics.examples,
    }


def _named(files: Sequence[Path]) -> str:
    return f"{len(files)} files: {', '.join(str(file) for file in files)}" if files else "no files"
