"""One worker's part of a training job, from its plan to its summary.

    start -> | pass over the data -> barrier -> shrink, save | x passes -> evaluate -> leave

Worker 0 loads, shrinks, saves and evaluates; the others wait for it at barriers. A resumed run starts in the
middle of this: in the epoch, and at the position in its data, that the checkpoint says.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from protos.store import Checkpoints, ReduceOp, Store
from ps_server.checkpoint.retention import remove_unfinished
from ps_worker.checkpoints.attachments import attachments_of
from ps_worker.checkpoints.resume import EarlierRun, earlier_run
from ps_worker.checkpoints.retention import (
    checkpoints_of_runs,
    name_after_epoch,
    warn_of_earlier_run,
)
from ps_worker.checkpoints.run_state import RUN_ATTACHMENT, RunState
from ps_worker.checkpoints.saver import Saver
from ps_worker.checkpoints.warm_start import WarmStart, require_schema, warm_start_of
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.files.file_split import file_splits, shown
from ps_worker.data.formats import reader_of
from ps_worker.heter.trainers import HeterTrainers
from ps_worker.job import Job
from ps_worker.job.datasets import (
    TrainingData,
    digest_of_files,
    format_of_job,
    order_of_data,
    streamed,
)
from ps_worker.job.model import DENSE_BLOCK, errors_of_model
from ps_worker.job.specs import counting_tables
from ps_worker.run.passes import Pass, epochs
from ps_worker.run.plan import Plan
from ps_worker.run.run import Run
from ps_worker.run.summary import Summary
from ps_worker.run.termination import EXIT_CODE
from ps_worker.training.evaluator import figures

logger = logging.getLogger(__name__)


def train_job(
    plan: Plan,
    store: Store,
    *,
    worker: int = 0,
    num_workers: int = 1,
    num_heter: int = 0,
    heter: HeterTrainers | None = None,
    is_in_process: bool = True,
    on_joined: Callable[[Run], None] = lambda _: None,
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> Summary:
    """Trains, saves and evaluates; returns the figures.

    Args:
        plan: What to do.
        store: The parameters.
        worker: Index of this worker.
        num_workers: Workers of the job.
        num_heter: See `Run`.
        heter: See `Run`.
        is_in_process: See `Run`.
        on_joined: Called once this process has its place among the workers.
        is_told_to_end: Whether this worker is to end after the step that it is in, and the job goes on.

    Raises:
        SystemExit: With the exit code of SIGTERM, if it was told to end.
        CtrPsError: If anything goes wrong; says what.
    """
    job = plan.job
    # All that can fail comes after joining: the others are told, and no other process has this one's place.
    with (
        errors_of_model(job),
        Run(
            store,
            plan.model,
            job,
            worker=worker,
            num_workers=num_workers,
            num_heter=num_heter,
            heter=heter,
            is_in_process=is_in_process,
            terms=_terms(plan),
        ) as run,
    ):
        on_joined(run)
        data = _data_of(plan, worker, num_workers)
        files = digest_of_files(plan.train_files)
        earlier, start = _load(plan, run, files) if run.is_first else (None, None)
        run.start()
        training = _Training(
            plan, run, data, files=files, earlier=earlier, is_told_to_end=is_told_to_end
        )
        seconds = training.train()
        summary = training.summary(seconds, start)
        run.leave()
    return summary


def _load(plan: Plan, run: Run, files: str) -> tuple[EarlierRun | None, WarmStart | None]:
    """Loads what the job starts with, and resumes the run that saved it if it says so; worker 0 alone."""
    job = plan.job
    if job.checkpoint.dir:
        _prepare_folder(job, run.store)
    earlier = earlier_run(job, num_workers=run.num_workers, files=files)
    if run.is_replacement:
        return earlier, None  # the process before this one has loaded it
    start = None if earlier else warm_start_of(job, plan.model)
    if start_from := job.checkpoint.load if earlier is None else earlier.url:
        takes_dense = start is None or DENSE_BLOCK in start.taken
        require_schema(job, plan.schema, start_from, takes_dense=takes_dense)
    if earlier is not None:
        run.load(earlier.url, token=earlier.token)
        workers = range(run.num_workers)  # not heter trainers, which have no data to resume in
        progress = {worker: of for worker, of in earlier.progress.items() if worker in workers}
        run.resume(earlier.version, progress)
    elif job.checkpoint.load:
        run.load(job.checkpoint.load, only=job.checkpoint.only)
    return earlier, start


def _data_of(plan: Plan, worker: int, num_workers: int) -> TrainingData:
    """Returns a worker's share of the training data."""
    parts = file_splits(
        lambda path: reader_of(path, plan.schema, BadRows(), format_of_job(plan.job)),
        plan.train_files,
        worker,
        num_workers,
    )
    named = f"{len(parts)} files: {', '.join(map(shown, parts))}" if parts else "no files"
    logger.info("worker %d trains on %s", worker, named)
    return TrainingData(plan.job, plan.schema, parts)


def _prepare_folder(job: Job, store: Checkpoints) -> None:
    """Finds out whether the folder takes checkpoints, and removes files of unfinished saves."""
    folder = job.checkpoint.dir
    store.require_writable(folder)
    for name in remove_unfinished(folder):
        logger.info("removed files of an unfinished save: %s", name)
    if not job.checkpoint.resume:
        warn_of_earlier_run(folder)


def _terms(plan: Plan) -> dict[str, str]:
    """Returns the settings in which all workers must agree, besides model and strategy."""
    job = plan.job
    return {
        "schema": plan.schema.fingerprint,
        "train.epochs": str(job.train.epochs),
        "data.shuffle": str(job.data.shuffle),
        "checkpoint.resume": str(job.checkpoint.resume),
    }


class _Training:
    """Passes, checkpoints and evaluation of a run that has started."""

    def __init__(
        self,
        plan: Plan,
        run: Run,
        data: TrainingData,
        *,
        files: str,
        earlier: EarlierRun | None,
        is_told_to_end: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._job = plan.job
        self._run = run
        self._data = data
        self._files = files
        self._earlier = earlier
        self._is_told_to_end = is_told_to_end
        has_saver = run.is_first and self._job.checkpoint.dir
        self._saver = self._new_saver() if has_saver else None

    def _new_saver(self) -> Saver:
        store, step = self._run.store, self._run.progress.steps
        settings = self._job.checkpoint
        if self._earlier is None:
            return Saver(store, settings, step=step)
        own = checkpoints_of_runs(settings.dir)
        return Saver(store, settings, step=step, latest=self._earlier.url, own=own)

    def train(self) -> float:
        """Trains the epochs that are left; returns the seconds that all workers took for it."""
        run, last = self._run, self._job.train.epochs
        done = self._epochs_done()
        if done >= last:
            logger.info("nothing is left to train: epochs=%d", done)
        seconds = 0.0
        for each in epochs(self._data, run, first=done + 1, last=last):
            start = time.monotonic()
            with closing(each.batches) as batches:
                run.train(
                    batches,
                    after_step=self._after_step(each),
                    is_told_to_end=self._is_told_to_end,
                )
            self._end_if_told()
            run.barrier(each.name)
            seconds += time.monotonic() - start
            run.progress.log()
            self._shrink_after(each)
            self._save_after(each)
            if not each.is_last:
                run.barrier(f"saved-{each.number}")
        if self._saver is not None:
            self._saver.finish()
        return seconds

    def _end_if_told(self) -> None:
        if self._is_told_to_end():
            self._run.end_early()
            logger.info("ended by SIGTERM step=%d", self._run.progress.steps)
            raise SystemExit(EXIT_CODE)

    def _epochs_done(self) -> int:
        """Returns the number of epochs that all workers have ended; worker 0 tells the others."""
        if not self._job.checkpoint.resume:
            return 0
        known = 0 if self._earlier is None else self._earlier.state.epochs_done
        told = self._run.all_reduce(np.array([float(known)]), ReduceOp.MAX, "epochs done")
        return int(told[0])

    def _shrink_after(self, each: Pass) -> None:
        """Ends a pass in tables that keep statistics, while all other workers wait or have ended."""
        every = self._job.life.shrink_every_epochs
        is_due = every and each.number % every == 0
        if self._run.is_first and is_due and counting_tables(self._plan.model, self._job):
            if self._saver is not None:
                self._saver.finish()  # a server waits for that no longer than for other workers
            self._run.shrink()

    def _after_step(self, each: Pass) -> Callable[[], None] | None:
        """Returns the callback that saves checkpoints within a pass; None: no such checkpoints."""
        saver, run = self._saver, self._run
        if saver is None or not self._job.checkpoint.is_within_epochs:
            return None

        def begin() -> Mapping[str, bytes]:
            run.settle()
            return self._attachments(epochs_done=each.number - 1, is_between_epochs=False)

        return lambda: saver.after_step(run.progress.steps, begin)

    def _save_after(self, each: Pass) -> None:
        if self._run.is_repeating:
            return  # the others have gone on since: it would be of another moment
        every = self._job.checkpoint.every_epochs
        is_due = each.is_last or (every and each.number % every == 0)
        if self._saver is not None and is_due:
            attachments = self._attachments(epochs_done=each.number, is_between_epochs=True)
            name = name_after_epoch(each.number)
            self._saver.save(name, self._run.progress.steps, attachments)

    def _attachments(self, *, epochs_done: int, is_between_epochs: bool) -> dict[str, bytes]:
        state = RunState(
            epochs_done=epochs_done,
            is_between_epochs=is_between_epochs,
            num_workers=self._run.num_workers,
            files=self._files,
            order=order_of_data(self._job),
        )
        attachments = attachments_of(self._job, self._plan.schema)
        return {**attachments, RUN_ATTACHMENT: state.to_json().encode()}

    def summary(self, seconds: float, warm_start: WarmStart | None) -> Summary:
        """Returns the figures; those of all workers, and of the evaluation, on worker 0 alone."""
        progress, store = self._run.progress, self._run.store
        own = Summary(
            compute=self._job.train.compute,
            train_loss=progress.mean_loss,
            bad_rows=self._data.bad_rows,
            skipped_batches=self._run.non_finite.skipped,
            skipped_by_name=self._run.non_finite.by_name,
        )
        if not self._run.is_first:
            return replace(own, examples=progress.examples)
        status = store.status()
        # Not heter trainers, which have no data.
        lost = sorted(worker for worker in status.lost if worker < self._run.num_workers)
        if lost:
            logger.warning(
                "workers %s were lost: what was left of their data was not trained on", lost
            )
        examples = sum(status.examples.values())
        return replace(
            own,
            **self._evaluation(),
            examples=examples,
            examples_per_s=examples / seconds if seconds else 0.0,
            staleness=status.staleness.as_dict(),
            duplicates=status.duplicates,
            lost_workers=lost,
            tables={name: asdict(table) for name, table in status.tables.items()},
            model_digest=store.digest(),
            checkpoint=None if self._saver is None else self._saver.latest,
            warm_start=None if warm_start is None else asdict(warm_start),
        )

    def _evaluation(self) -> dict[str, Any]:
        if not self._plan.test_files:
            return {}
        dataset = streamed(self._job, self._plan.schema)
        dataset.set_filelist(self._plan.test_files)
        metrics = self._run.evaluate(dataset)
        if not metrics.examples:
            logger.warning(
                "nothing was evaluated: the files of data.test have no rows with a label"
            )
        return figures(metrics)
