"""One worker's part of a training job, from the first declaration to the last figure.

    start -> | pass over the data -> meet -> save | x epochs -> evaluate -> done

Worker 0 loads, saves and evaluates; the others meet it at barriers. A run that goes on begins in the middle
of this: in the epoch, and at the position in its data, that the checkpoint says. An embedded run is the same
with one worker and a store in this process.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ctr_model.models.model import Model
from ctr_model.schema import Schema
from protos.errors import DataError, UsageError
from protos.store import ReduceOp, Store
from ps_server.checkpoint.retention import remove_unfinished
from ps_worker.checkpoints.attachments import attachments_of
from ps_worker.checkpoints.resume import EarlierRun, earlier_run
from ps_worker.checkpoints.retention import (
    checkpoints_of_runs,
    name_after_epoch,
    require_other_folder,
    warn_of_earlier_run,
)
from ps_worker.checkpoints.run_state import RUN_ATTACHMENT, RunState
from ps_worker.checkpoints.saver import Saver
from ps_worker.checkpoints.warm_start import WarmStart, require_schema, warm_start_of
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.position import DataPosition
from ps_worker.data.files.file_split import FileSplit, file_splits, shown
from ps_worker.data.files.listing import matching_files
from ps_worker.data.formats import reader_of
from ps_worker.job import Job
from ps_worker.job.checks import require_life, require_optimizers
from ps_worker.job.datasets import (
    TrainingData,
    digest_of_files,
    format_of_job,
    order_of_data,
    streamed,
)
from ps_worker.job.model import DENSE_BLOCK, model_of
from ps_worker.job.specs import counting_tables
from ps_worker.training.evaluator import figures
from ps_worker.training.shrinking import log_shrunk
from ps_worker.training.worker import Worker

logger = logging.getLogger(__name__)


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
        staleness: Of all workers' batches: how many steps of others each was late..
        tables: Of each table rows and bytes, and how many rows have expired or were evicted.
        model_digest: SHA-256 of the trained model.
        checkpoint: Folder of the last checkpoint.
        warm_start: Which checkpoint the run started from, what was taken, and what began anew.
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
    tables: Mapping[str, Mapping[str, int]] | None = None
    model_digest: str | None = None
    checkpoint: str | None = None
    warm_start: Mapping[str, object] | None = None

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
        JobError: If schema, format, model, optimizers, the life of rows or the start are wrong.
        DataError: If a pattern matches no file.
        CheckpointError: If checkpoints cannot be where the job says.
    """
    schema = _schema_of(job)
    _require_format(job)
    model = model_of(job, schema)
    require_optimizers(job, model)
    require_life(job, model)
    warm_start_of(job, model)
    _require_order(job)
    require_other_folder(job)
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
        raise job.error("data.schema", str(error)) from error


def _require_format(job: Job) -> None:
    try:
        format_of_job(job)
    except UsageError as error:
        raise job.error("data.format", str(error)) from error


def _require_order(job: Job) -> None:
    """Refuses a run that could not go on from its own checkpoints."""
    checkpoint, data = job.checkpoint, job.data
    has_order = data.reader_num == 1 or data.in_memory
    if checkpoint.resume and checkpoint.is_within_epochs and not has_order:
        raise job.error(
            "data.reader_num",
            f"data.reader_num is {data.reader_num}, but a run can go on from the middle of an epoch only "
            f"where rows have an order: set data.reader_num = 1 or data.in_memory = true, or save between "
            f"epochs only (checkpoint.every_steps = 0, checkpoint.every_s = 0)",
        )


def _files_of(job: Job, key: str, patterns: Sequence[str]) -> list[str]:
    try:
        return matching_files(patterns)
    except DataError as error:
        raise DataError(f"{job.place_of(key)}: {key}: {error}") from error


class Session:
    """Runs one worker of a job on a store that is there already."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        *,
        worker: int = 0,
        num_workers: int = 1,
        is_in_process: bool = True,
    ) -> None:
        """Deals this worker its files.

        Args:
            plan: What to do.
            store: The parameters.
            worker: Index of this worker.
            num_workers: Workers of the job.
            is_in_process: The store is in this process, and there is nothing to gain from sending in the
                background.
        """
        self._plan = plan
        self._job = plan.job
        self._store = store
        self._worker = worker
        self._num_workers = num_workers
        self._is_in_process = is_in_process
        self._train_splits = file_splits(
            lambda path: reader_of(path, plan.schema, BadRows(), format_of_job(plan.job)),
            plan.train_files,
            worker,
            num_workers,
        )
        self._files_digest = digest_of_files(plan.train_files)
        self._bad_rows = 0
        self._saver: Saver | None = None
        self._warm_start: WarmStart | None = None

    @property
    def is_first(self) -> bool:
        """Whether this worker saves and evaluates."""
        return self._worker == 0

    def run(self) -> Summary:
        """Trains, saves and evaluates; returns what came out of it."""
        logger.info("worker %d trains on %s", self._worker, _named(self._train_splits))
        if self.is_first and self._job.checkpoint.dir:
            self._prepare_folder()
        load = self._job.checkpoint.load
        earlier_run = self._earlier_run() if self.is_first else None
        self._warm_start = None if earlier_run else warm_start_of(self._job, self._plan.model)
        if self.is_first and (start_from := load if earlier_run is None else earlier_run.url):
            takes_dense = self._warm_start is None or DENSE_BLOCK in self._warm_start.taken
            require_schema(self._job, self._plan.schema, start_from, takes_dense=takes_dense)
        with Worker(
            self._store,
            self._plan.model,
            self._job,
            index=self._worker,
            num_workers=self._num_workers,
            is_in_process=self._is_in_process,
            load=load,
            only=self._job.checkpoint.only,
            earlier_run=earlier_run,
            agreement=self._agreement(),
        ) as worker:
            if self.is_first and self._job.checkpoint.dir:
                self._saver = self._saver_from(worker.progress.steps, earlier_run)
            seconds = self._train(worker, self._epochs_done(worker, earlier_run))
            summary = self._summary(worker, seconds)
            worker.leave()
        return summary

    def _prepare_folder(self) -> None:
        """Finds out whether the folder takes checkpoints, and tidies up what a killed save has left."""
        folder = self._job.checkpoint.dir
        self._store.require_writable(folder)
        for name in remove_unfinished(folder):
            logger.info("removed what a save that did not finish has left: %s", name)
        if not self._job.checkpoint.resume:
            warn_of_earlier_run(folder)

    def _saver_from(self, step: int, earlier_run: EarlierRun | None) -> Saver:
        settings = self._job.checkpoint
        if earlier_run is None:
            return Saver(self._store, settings, step=step)
        own = checkpoints_of_runs(settings.dir)
        return Saver(self._store, settings, step=step, latest=earlier_run.url, own=own)

    def _agreement(self) -> str:
        """Returns what workers must have in common, as a text."""
        return json.dumps(
            {
                "schema": self._plan.schema.fingerprint,
                "model": self._job.model.model_dump(mode="json"),
                "strategy": self._job.strategy.model_dump(mode="json"),
                "epochs": self._job.train.epochs,
                "shuffle": self._job.data.shuffle,
                "resume": self._job.checkpoint.resume,
            },
            sort_keys=True,
        )

    def _earlier_run(self) -> EarlierRun | None:
        return earlier_run(self._job, num_workers=self._num_workers, files=self._files_digest)

    def _epochs_done(self, worker: Worker, earlier_run: EarlierRun | None) -> int:
        """Returns how many epochs are behind all workers; worker 0 knows, and tells the others."""
        if not self._job.checkpoint.resume:
            return 0
        known = 0 if earlier_run is None else earlier_run.state.epochs_done
        told = worker.all_reduce("epochs done", np.array([float(known)]), ReduceOp.MAX)
        return int(told[0])

    def _train(self, worker: Worker, epochs_done: int) -> float:
        """Goes through the rest of `epochs` passes; returns the seconds that all workers took for it."""
        data = TrainingData(self._job, self._plan.schema, self._train_splits)
        epochs = self._job.train.epochs
        if epochs_done >= epochs:
            logger.info("nothing is left to train: epochs=%d", epochs_done)
        seconds = 0.0
        for epoch in range(epochs_done + 1, epochs + 1):
            data.prepare(worker, epoch)
            start = time.monotonic()
            with closing(data.batches(epoch, _position_in(epoch, worker))) as batches:
                worker.train(batches, after_step=self._after_step(worker, epoch))
            self._bad_rows = data.bad_rows
            worker.barrier(f"epoch-{epoch}")
            seconds += time.monotonic() - start
            worker.progress.log()
            self._shrink(epoch)
            self._save_after(epoch, worker)
            if epoch < epochs:
                worker.barrier(f"saved-{epoch}")
        if self._saver is not None:
            self._saver.finish()
        return seconds

    def _shrink(self, epoch: int) -> None:
        """Ends a pass in tables that keep statistics, while all other workers wait or have ended."""
        every = self._job.life.shrink_every_epochs
        counting = counting_tables(self._plan.model, self._job)
        if self.is_first and counting and every and epoch % every == 0:
            if self._saver is not None:
                self._saver.finish()  # a server waits for that no longer than for other workers
            shrunk = self._store.shrink()
            log_shrunk({name: shrunk[name] for name in sorted(counting)})

    def _after_step(self, worker: Worker, epoch: int) -> Callable[[], None] | None:
        """Returns what takes checkpoints within an epoch."""
        saver = self._saver
        if saver is None or not self._job.checkpoint.is_within_epochs:
            return None

        def begin() -> Mapping[str, bytes]:
            worker.settle()
            return self._attachments(epochs_done=epoch - 1, is_between_epochs=False)

        return lambda: saver.after_step(worker.progress.steps, begin)

    def _save_after(self, epoch: int, worker: Worker) -> None:
        every = self._job.checkpoint.every_epochs
        is_due = epoch == self._job.train.epochs or (every and epoch % every == 0)
        if self._saver is not None and is_due:
            attachments = self._attachments(epochs_done=epoch, is_between_epochs=True)
            self._saver.save(name_after_epoch(epoch), worker.progress.steps, attachments)

    def _attachments(self, *, epochs_done: int, is_between_epochs: bool) -> dict[str, bytes]:
        state = RunState(
            epochs_done=epochs_done,
            is_between_epochs=is_between_epochs,
            num_workers=self._num_workers,
            files=self._files_digest,
            order=order_of_data(self._job),
        )
        attachments = attachments_of(self._job, self._plan.schema)
        return {**attachments, RUN_ATTACHMENT: state.to_json().encode()}

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
            examples_per_s=examples / seconds if seconds else 0.0,
            staleness=status.staleness.as_dict(),
            tables={name: asdict(table) for name, table in status.tables.items()},
            model_digest=self._store.digest(),
            checkpoint=None if self._saver is None else self._saver.latest,
            warm_start=None if self._warm_start is None else asdict(self._warm_start),
        )

    def _evaluation(self, worker: Worker) -> dict[str, Any]:
        if not self._plan.test_files:
            return {}
        dataset = streamed(self._job, self._plan.schema)
        dataset.set_filelist(self._plan.test_files)
        return figures(worker.evaluate(dataset))


def _position_in(epoch: int, worker: Worker) -> DataPosition | None:
    """Returns where in an epoch a worker goes on; None: at its start."""
    earlier = worker.earlier_progress
    if earlier is None or not earlier.position:
        return None
    position = DataPosition.from_json(earlier.position)
    return position if position.epoch == epoch else None  # else it had not begun this one


def _named(parts: Sequence[FileSplit]) -> str:
    return f"{len(parts)} files: {', '.join(map(shown, parts))}" if parts else "no files"
