"""One worker's part of a training job, from its plan to its summary.

    start -> | pass over the data -> barrier -> shrink, validate, save | x passes -> evaluate -> leave

Worker 0 loads, shrinks, validates, saves and evaluates; the others wait for it at barriers. A resumed run
starts in the middle of this: in the epoch, and at the position in its data, that the checkpoint says.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from ctr_ps.protos.errors import counted
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.checkpoints.claim import Claim, claimed
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit, shown, splits_of_workers
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import TrainingData, format_of_job
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.run.figures.run_folder import RunFolder
from ctr_ps.ps_worker.run.guests import DenseTrainers
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints
from ctr_ps.ps_worker.run.training_job.metrics_writer import MetricsWriter
from ctr_ps.ps_worker.run.training_job.start import clear_folder, start_of
from ctr_ps.ps_worker.run.training_job.summary import Summarizer, Summary
from ctr_ps.ps_worker.run.training_job.training import Training
from ctr_ps.ps_worker.run.training_job.validation import Validator

logger = logging.getLogger(__name__)


def train_job(
    plan: Plan,
    store: Store,
    *,
    heter: DenseTrainers | None = None,
    on_joined: Callable[[Run], None] = lambda _: None,
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> Summary:
    """Trains, saves and evaluates; returns the figures.

    Args:
        plan: What to do, and in which role.
        store: The parameters.
        heter: See `Run`.
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
        Run(store, plan, heter=heter) as run,
    ):
        on_joined(run)
        parts = _parts_of_workers(plan, run.num_workers)
        data = TrainingData(job, plan.schema, parts[run.worker])
        without_rows = [] if data.is_shuffled_globally else _without_rows(parts)
        _log_parts(parts, run.worker, without_rows)
        run_folder = _folder_of(job, run)
        with _claimed(job, run, plan.role.endpoints) as claim:
            start = start_of(plan, run, data, claim)
            with run_folder as folder:
                run.start(data.head(), num_training=run.num_workers - len(without_rows))
                clear_folder(job, run, start)
                metrics = MetricsWriter(folder, run)
                validator = Validator(plan, run, metrics)
                checkpoints = JobCheckpoints(plan, run, validator, start)
                training = Training(
                    plan, run, data, metrics, validator, checkpoints, is_told_to_end
                )
                trained = training.train(start.earlier)
                summarizer = Summarizer(plan, run, metrics, validator.validations, checkpoints)
                summary = summarizer.summarize(trained, data.bad_rows, start.warm_start)
        run.leave()
    return summary


def _claimed(job: Job, run: Run, servers: Sequence[str]) -> AbstractContextManager[Claim | None]:
    """Returns the claim on the folder of checkpoints, on worker 0 if the job names one."""
    if not run.is_first:
        return nullcontext()
    return claimed(job, is_of_this_run=run.is_replacement, servers=servers)


def _folder_of(job: Job, run: Run) -> AbstractContextManager[RunFolder | None]:
    """Returns the folder for figures, on worker 0 if the job names one."""
    if not run.is_first or not job.run.dir:
        return nullcontext()
    return RunFolder(job, is_continued=job.checkpoint.resume or run.is_replacement)


def _parts_of_workers(plan: Plan, num_workers: int) -> list[list[FileSplit]]:
    """Returns each worker's share of the training files, which all workers compute alike."""
    return splits_of_workers(
        lambda path: reader_of(path, plan.schema, BadRows(), format_of_job(plan.job)),
        plan.train_files,
        num_workers,
        plan.stamps,
    )


def _without_rows(parts: Sequence[Sequence[FileSplit]]) -> list[int]:
    return [worker for worker, own in enumerate(parts) if not own]


def _log_parts(
    parts: Sequence[Sequence[FileSplit]], worker: int, without_rows: Sequence[int]
) -> None:
    """Logs what a worker reads; worker 0, and those without rows, warn of all that have none."""
    own = parts[worker]
    named = f"{counted(len(own), 'file')}: {', '.join(map(shown, own))}" if own else "no files"
    logger.info("worker %d trains on %s", worker, named)
    if without_rows and (worker == 0 or worker in without_rows):
        logger.warning(
            "%s of %d without rows to train on: %s; data.train can be divided into %s only (a file, a row "
            "group of Parquet or a stripe of ORC is read by one worker, and so is compressed text): start "
            "fewer workers, or write more files or smaller row groups",
            counted(len(without_rows), "worker"),
            len(parts),
            ", ".join(map(str, without_rows)),
            counted(sum(map(len, parts)), "part"),
        )
