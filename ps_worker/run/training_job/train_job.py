"""One worker's part of a training job, from its plan to its summary.

    start -> | pass over the data -> barrier -> shrink, validate, save | x passes -> evaluate -> leave

Worker 0 loads, shrinks, validates, saves and evaluates; the others wait for it at barriers. A resumed run
starts in the middle of this: in the epoch, and at the position in its data, that the checkpoint says.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ctr_ps.protos.errors import counted
from ctr_ps.protos.store import Store
from ctr_ps.ps_worker.checkpoints.claim import claimed
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit, shown, splits_of_workers
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.job.datasets import TrainingData, format_of_job
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.run.guests import DenseTrainers
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter, RunFolder
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints, clear_folder, start_of
from ctr_ps.ps_worker.run.training_job.summary import Summary, summarize
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
    with errors_of_model(job), Run(store, plan, heter=heter) as run:
        on_joined(run)
        # All workers compute the shares of all alike.
        parts = splits_of_workers(
            lambda path: reader_of(path, plan.schema, BadRows(), format_of_job(job)),
            plan.train_files,
            run.num_workers,
            plan.stamps,
        )
        data = TrainingData(job, plan.schema, parts[run.worker])
        is_shared = data.is_shuffled_globally
        without_rows = [] if is_shared else [k for k, own in enumerate(parts) if not own]
        _log_parts(parts, run.worker, without_rows)
        folder = None
        if run.is_first and job.run.dir:
            folder = RunFolder(job, is_continued=job.checkpoint.resume or run.is_replacement)
        with ExitStack() as stack:
            claim = None
            if run.is_first:
                is_own, servers = run.is_replacement, plan.role.endpoints
                claim = stack.enter_context(claimed(job, is_of_this_run=is_own, servers=servers))
            start = start_of(plan, run, data, claim)
            if folder is not None:
                stack.enter_context(folder)
            run.start(data.head(), num_training=run.num_workers - len(without_rows))
            clear_folder(job, run, start)
            metrics = MetricsWriter(folder, run)
            validator = Validator(plan, run, metrics)
            checkpoints = JobCheckpoints(plan, run, validator, start)
            training = Training(plan, run, data, metrics, validator, checkpoints, is_told_to_end)
            training.train(start.earlier)
            summary = summarize(training, start.warm_start)
        run.leave()
    return summary


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
