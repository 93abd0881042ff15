"""One worker's part of a training job, from the first declaration to the last figure.

    start -> | pass over the data -> meet -> save | x epochs -> evaluate -> done

Worker 0 loads, saves and evaluates; the others meet it at barriers. An embedded run is the same with one
worker and a store in this process.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ctr_model.metrics import ClickMetrics
from ctr_model.models.model import Model
from ctr_model.registry import build_model
from ctr_model.schema import Schema
from protos.errors import DataError, UsageError
from protos.store import Store
from ps_server.checkpoint.publish import require_writable, write_latest
from ps_server.checkpoint.reader import Checkpoint
from ps_worker.data.bad_rows import BadRows
from ps_worker.data.file_split import shown, split_parts
from ps_worker.data.files import matching_files
from ps_worker.data.formats import reader_of
from ps_worker.data.reader import FilePart
from ps_worker.job import Job
from ps_worker.job.faults import first_named
from ps_worker.job_data import TrainingData, format_of_job, streamed
from ps_worker.optimizer_checks import require_optimizers
from ps_worker.saved_schema import SCHEMA_ATTACHMENT, schema_of_checkpoint
from ps_worker.worker import Worker

logger = logging.getLogger(__name__)

JOB_ATTACHMENT = "job.json"
MODEL_ATTACHMENT = "model.py"


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
        staleness: Of all workers' batches: how many steps of others each was late (protos/staleness.py).
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
    staleness: Mapping[str, object] | None = None
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
    train_files: list[str]
    test_files: list[str]


def plan_of(job: Job) -> Plan:
    """Returns the job with its schema, model and files.

    Raises:
        JobError: If schema, format, model or optimizers are wrong.
        DataError: If a pattern matches no file.
    """
    schema = _schema_of(job)
    _require_format(job)
    model = model_of(job, schema)
    require_optimizers(job, model)
    return Plan(
        job=job,
        schema=schema,
        model=model,
        train_files=_files_of(job, "data.train", job.data.train),
        test_files=_files_of(job, "data.test", job.data.test),
    )


def _schema_of(job: Job) -> Schema:
    try:
        return Schema.load(job.data.schema_source)
    except ValueError as error:
        raise job.error("data.schema", f"data.schema: {error}") from error


def _require_format(job: Job) -> None:
    try:
        format_of_job(job)
    except UsageError as error:
        raise job.error("data.format", f"data.format: {error}") from error


def _files_of(job: Job, key: str, patterns: Sequence[str]) -> list[str]:
    try:
        return matching_files(patterns)
    except DataError as error:
        raise DataError(f"{job.place_of(key)}: {key}: {error}") from error


def model_of(job: Job, schema: Schema) -> Model:
    """Returns the model that a job names, for the columns of a schema.

    Raises:
        JobError: If there is no such model, or an option is wrong.
    """
    try:
        return build_model(job.model.name, schema, job.model.options)
    except ValueError as error:
        option = first_named(job.model.options, error) or "name"
        raise job.error(f"model.{option}", str(error)) from error


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
        self._num_workers = num_workers
        self._is_embedded = is_embedded
        self._train_parts = split_parts(
            lambda path: reader_of(path, plan.schema, BadRows(), format_of_job(plan.job)),
            plan.train_files,
            worker,
            num_workers,
        )
        self._bad_rows = 0
        self._checkpoint: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this worker saves and evaluates."""
        return self._worker == 0

    def run(self) -> Summary:
        """Trains, saves and evaluates; returns what came out of it."""
        logger.info("worker %d trains on %s", self._worker, _named(self._train_parts))
        if self.is_first and self._job.checkpoint.dir:
            require_writable(self._job.checkpoint.dir)
        if self.is_first and self._job.checkpoint.load:
            self._require_schema(self._job.checkpoint.load)
        with Worker(
            self._store,
            self._plan.model,
            self._job,
            index=self._worker,
            num_workers=self._num_workers,
            is_embedded=self._is_embedded,
            load=self._job.checkpoint.load,
            agreement=self._agreement(),
        ) as worker:
            seconds = self._train(worker)
            summary = self._summary(worker, seconds)
            worker.done()
        return summary

    def _agreement(self) -> str:
        """Returns what workers must have in common, as a text."""
        return json.dumps(
            {
                "schema": self._plan.schema.fingerprint,
                "model": self._job.model.model_dump(mode="json"),
                "strategy": self._job.strategy.model_dump(mode="json"),
                "epochs": self._job.train.epochs,
                "shuffle": self._job.data.shuffle,
            },
            sort_keys=True,
        )

    def _require_schema(self, folder: str) -> None:
        """Refuses a checkpoint under whose schema keys and numbers mean something else."""
        checkpoint = Checkpoint.open(folder)
        if SCHEMA_ATTACHMENT not in checkpoint.attachments:
            return
        saved = schema_of_checkpoint(checkpoint)
        if saved.fingerprint != self._plan.schema.fingerprint:
            raise self._job.error(
                "data.schema",
                f"{checkpoint.url!r} was trained with another schema: name that one in data.schema, "
                f"or start without checkpoint.load",
            )

    def _train(self, worker: Worker) -> float:
        """Goes through the data `epochs` times; returns the seconds that all workers took for it."""
        data = TrainingData(self._job, self._plan.schema, self._train_parts)
        seconds = 0.0
        for epoch in range(1, self._job.train.epochs + 1):
            data.prepare(worker)
            start = time.monotonic()
            with closing(data.batches()) as batches:
                worker.train(batches)
            self._bad_rows = data.bad_rows
            worker.meet(f"epoch-{epoch}")
            seconds += time.monotonic() - start
            worker.progress.log()
            self._save(f"epoch-{epoch}")
            if epoch < self._job.train.epochs:
                worker.meet(f"saved-{epoch}")
        return seconds

    def _save(self, name: str) -> None:
        if not (self.is_first and self._job.checkpoint.dir):
            return
        root = self._job.checkpoint.dir
        self._checkpoint = f"{root.rstrip('/')}/{name}"
        self._store.save(self._checkpoint, attachments_of(self._job, self._plan.schema))
        write_latest(root, name)
        logger.info("saved %s", self._checkpoint)

    def _summary(self, worker: Worker, seconds: float) -> Summary:
        progress = worker.progress
        own = Summary(train_loss=progress.mean_loss, bad_rows=self._bad_rows)
        if not self.is_first:
            return replace(own, examples=progress.examples)
        status = self._store.status()
        examples = sum(status.examples.values())
        return replace(
            own,
            **self._evaluation(worker),
            examples=examples,
            examples_per_s=examples / seconds,
            staleness=status.staleness.as_dict(),
            model_digest=self._store.digest(),
            checkpoint=self._checkpoint,
        )

    def _evaluation(self, worker: Worker) -> dict[str, Any]:
        if not self._plan.test_files:
            return {}
        dataset = streamed(self._job, self._plan.schema)
        dataset.set_filelist(self._plan.test_files)
        return figures(worker.evaluate(dataset))


def attachments_of(job: Job, schema: Schema) -> dict[str, bytes]:
    """Returns what a checkpoint says of its model besides parameters, by name of the file."""
    attachments = {
        JOB_ATTACHMENT: job.to_json().encode(),
        SCHEMA_ATTACHMENT: json.dumps(schema.to_dict(), indent=1).encode(),
    }
    own_file = own_model_file(job)
    if own_file is not None:
        attachments[MODEL_ATTACHMENT] = own_file.read_bytes()
    return attachments


def own_model_file(job: Job) -> Path | None:
    """Returns the file of a model of the user's own; None for a model of this package."""
    path, _, _ = job.model.name.rpartition(":")
    return Path(path) if path.endswith(".py") else None


def figures(metrics: ClickMetrics) -> dict[str, Any]:
    """Returns the figures of an evaluation, by their names in summaries."""
    return {
        "auc": metrics.auc(),
        "log_loss": metrics.log_loss(),
        "accuracy": metrics.accuracy(),
        "calibration": metrics.calibration(),
        "test_examples": metrics.examples,
    }


def _named(parts: Sequence[FilePart]) -> str:
    return f"{len(parts)} files: {', '.join(map(shown, parts))}" if parts else "no files"
