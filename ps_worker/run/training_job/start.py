"""Start of a training job: the checkpoint that it resumes from, or starts with."""

import logging
from dataclasses import dataclass

from ctr_ps.ps_server.checkpoint.publish import forget_best, remove_unfinished
from ctr_ps.ps_worker.checkpoints.claim import Claim
from ctr_ps.ps_worker.checkpoints.resume import EarlierRun, earlier_run, require_free_folder
from ctr_ps.ps_worker.checkpoints.warm_start import WarmStart, require_schema, warm_start_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import TrainingData, digest_of_files
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts with; what was loaded is known on worker 0 alone.

    Attributes:
        files: The training files, as `digest_of_files`.
        claim: On the folder of checkpoints; None: there is none, or it is worker 0's.
        earlier: The run that it resumes; None: none.
        warm_start: What it took from `checkpoint.load`; None: nothing, or a lost process has loaded it.
    """

    files: str
    claim: Claim | None
    earlier: EarlierRun | None = None
    warm_start: WarmStart | None = None

    def confirm(self, run: Run) -> None:
        """Checks that this process may replace files in the folder.

        Raises:
            CheckpointError: If another run has the folder.
            ProtocolError: If another process has this one's place.
        """
        if self.claim is not None:
            self.claim.require()
        run.confirm_place()


def start_of(plan: Plan, run: Run, data: TrainingData, claim: Claim | None) -> Start:
    """Returns what a run starts with; worker 0 loads it, and resumes the run that saved it if told to.

    No file is changed: what comes next may still be refused. The first rows of `data` are read if the model
    starts at their click rate.

    Raises:
        JobError: If the job does not fit the checkpoint, or its folder has those of another run.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    files = digest_of_files(plan.train_files)
    if not run.is_first:
        return Start(files=files, claim=claim)
    job = plan.job
    _require_folder(job, run)
    signature = plan.signatures["data.train"]
    earlier = earlier_run(job, num_workers=run.num_workers, files=files, signature=signature)
    if run.is_replacement:
        return Start(
            files=files, claim=claim, earlier=earlier
        )  # the process before this one has loaded it
    warm_start = None if earlier else warm_start_of(job, plan.model)
    if url := job.checkpoint.load if earlier is None else earlier.url:
        takes_dense = warm_start is None or DENSE_BLOCK in warm_start.taken
        resumes = earlier is not None
        require_schema(job, plan.model, plan.schema, url, takes_dense=takes_dense, resumes=resumes)
    _load(job, run, earlier, data)
    return Start(files=files, claim=claim, earlier=earlier, warm_start=warm_start)


def clear_folder(job: Job, run: Run, start: Start) -> None:
    """Removes what earlier runs left beside their checkpoints: files of unfinished saves, and `BEST`.

    A no-op on other workers than 0. For a run that has started, and that nothing will refuse.

    Raises:
        CheckpointError: If the folder cannot be read, or something in it cannot be removed.
    """
    folder = job.checkpoint.dir
    if not run.is_first or not folder:
        return
    start.confirm(run)
    for name in remove_unfinished(folder):
        logger.info("removed files of an unfinished save: %s", name)
    if start.earlier is None and not run.has_trained_before:
        forget_best(folder)  # an earlier run's, whose names this one saves again


def _require_folder(job: Job, run: Run) -> None:
    """Finds out whether the folder takes checkpoints of this run."""
    folder = job.checkpoint.dir
    if not folder:
        logger.warning(
            "no checkpoint will be saved, and what the model learns is lost when %s: set checkpoint.dir",
            "this run ends" if run.is_in_process else "the servers end",
        )
        return
    if not run.is_replacement:  # else they are of this run
        require_free_folder(job)
    run.store.require_writable(folder)


def _load(job: Job, run: Run, earlier: EarlierRun | None, data: TrainingData) -> None:
    if earlier is not None:
        run.load(earlier.url, token=earlier.token)
        workers = range(run.num_workers)  # not heter trainers, which have no data to resume in
        progress = {worker: of for worker, of in earlier.progress.items() if worker in workers}
        run.resume(earlier.version, progress, batches=earlier.batches)
        return
    if job.checkpoint.load:
        run.load(job.checkpoint.load, only=job.checkpoint.only, head=data.head())
