"""The checkpoints of a training job: what it starts from, what each says of its run, and BEST."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.store import StoreStatus
from ctr_ps.ps_server.checkpoint.files.manifest import BEST, MANIFEST, PUBLISHED
from ctr_ps.ps_server.checkpoint.publish import begin_gate, best_in, remove_unfinished, write_best
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of
from ctr_ps.ps_worker.checkpoints.claim import Claim
from ctr_ps.ps_worker.checkpoints.notices import Channel
from ctr_ps.ps_worker.checkpoints.resume import (
    RUN_ATTACHMENT,
    EarlierRun,
    RunState,
    Validation,
    earlier_run,
    require_free_folder,
)
from ctr_ps.ps_worker.checkpoints.retention import (
    checkpoints_of_runs,
    name_after_epoch,
    name_at_step,
)
from ctr_ps.ps_worker.checkpoints.saver import Saver
from ctr_ps.ps_worker.checkpoints.warm_start import WarmStart, require_schema, warm_start_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import digest_of_files, order_of_data, values_of_job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.passes import Pass
from ctr_ps.ps_worker.run.training_job.validation import Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a run starts with; what was loaded is known on worker 0 alone."""

    files: str  # the training files, as `digest_of_files`
    claim: Claim | None  # on the folder of checkpoints; None: there is none, or it is worker 0's
    earlier: EarlierRun | None = None  # the run that it resumes
    # what it took from `checkpoint.load`; None: nothing, or a lost process has loaded it
    warm_start: WarmStart | None = None

    def confirm(self, run: Run) -> None:
        """Raises CheckpointError if another run has the folder, ProtocolError without this place."""
        if self.claim is not None:
            self.claim.require()
        run.store.confirm_place(run.worker)


class JobCheckpoints:
    """Saves a run: worker 0 if the job names a folder; else all of this is a no-op.

    For one thread, besides `is_due_in_lull` and what `after_step_of` returns, which any may call.
    """

    def __init__(self, plan: Plan, run: Run, validator: Validator, start: Start) -> None:
        """Saves nothing yet; checkpoints say what `validator` has seen."""
        self._plan = plan
        self._job = plan.job
        self._run = run
        self._validator = validator
        self._files = start.files
        self._confirm = partial(start.confirm, run)
        is_on = run.is_first and bool(self._job.checkpoint.dir)
        self._saver = _saver_of(self._job, run, start.earlier, self._confirm) if is_on else None
        self._saved_examples = 0  # by all workers, before the last checkpoint
        files = plan.train_files if is_on else ()
        self._values = values_of_job(self._job, plan.schema, files)

    @property
    def latest(self) -> str | None:
        """The url of the newest complete checkpoint; None: no checkpoint yet."""
        return None if self._saver is None else self._saver.latest

    def name_within(self, validation: Validation) -> str:
        """Returns the name for a model in the middle of a pass; "" if nothing is saved."""
        if self._saver is None:
            return ""
        return name_at_step(validation.step, self._validations_at(validation.step) + 1)

    def name_after(self, validation: Validation) -> str:
        """Returns the name for a model at the end of a pass; "" if nothing is saved."""
        return "" if self._saver is None else name_after_epoch(validation.epoch)

    def name_before(self, validation: Validation) -> str:
        """Returns the name of the model of the best validation of a lost process; "" if nothing is saved.

        That process may have saved it, between two passes of a stream, and not had BEST name it.
        """
        if self._saver is None:
            return ""
        folder, name = self._job.checkpoint.dir, name_after_epoch(validation.epoch)
        return name if folder_at(folder).child(name).has(MANIFEST) else best_in(folder) or ""

    def after_step_of(self, each: Pass) -> Callable[[], None] | None:
        """Returns the callback that saves checkpoints within a pass, if only for one that a server lost.

        None: no such checkpoints.
        """
        saver, run, job = self._saver, self._run, self._job
        if saver is None or not (job.checkpoint.is_within_epochs or job.data.has_order):
            return None
        return lambda: saver.after_step(run.progress.steps, lambda: self._begin_within(each))

    def save_when_told(self, each: Pass) -> None:
        """Saves what was trained since the last checkpoint, as this worker ends in the middle of a pass."""
        saver, files = self._saver, self._job.train.epochs if self._plan.train_files else 0
        is_within = self._job.checkpoint.is_within_epochs
        if saver is None or not (is_within or (self._job.data.stream and each.number > files)):
            return
        if self._run.is_repeating:  # as for `_save`
            return
        saver.wait()
        if saver.is_owed or self._run.store.status().num_examples != self._saved_examples:
            saver.save_within(self._run.progress.steps, lambda: self._begin_within(each))

    def _begin_within(self, each: Pass) -> Mapping[str, bytes]:
        self._run.settle()
        return self._attachments(each, is_between_epochs=False)

    def is_due_in_lull(self, status: StoreStatus | None = None) -> bool:
        """Whether, without a message for worker 0, a checkpoint is due of what was trained since the last.

        Without a `status`, whether one would be due.
        """
        saver, step = self._saver, self._run.progress.steps
        if saver is None or not self._job.checkpoint.is_within_epochs or not saver.is_due(step):
            return False
        return status is None or saver.is_owed or status.num_examples != self._saved_examples

    def save_best_within(self, each: Pass, validation: Validation) -> None:
        """Saves the model of the best validation, in the middle of a pass, while all workers wait."""
        self._save(validation.checkpoint, each, is_between_epochs=False, named=[BEST])

    def save_last_within(self, each: Pass) -> None:
        """Saves the model of the last validation, in the middle of a pass, which ends with it."""
        step = self._run.progress.steps
        name = name_at_step(step, self._validations_at(step))
        self._save(name, each, is_between_epochs=False, named=[])

    def save_after(self, each: Pass, *, is_best: bool, is_published: bool) -> None:
        """Saves at the end of a pass, while all others wait; see `Saver.save`.

        Not while a stream had no row yet: readers would take a model that has learnt nothing.
        """
        if self._job.data.stream and not self._run.store.status().num_examples:
            return
        named = [BEST] * is_best + [PUBLISHED] * is_published
        self._save(name_after_epoch(each.number), each, is_between_epochs=True, named=named)

    def wait(self) -> None:
        """Returns when nothing is being written; see `Saver.wait`."""
        if self._saver is not None:
            self._saver.wait()

    def finish(self) -> None:
        """Returns when everything is written; see `Saver.finish`."""
        if self._saver is not None:
            self._saver.finish()

    def _validations_at(self, step: int) -> int:
        return sum(each.step == step for each in self._validator.validations)

    def write_best(self) -> None:
        """Has BEST name the best validation's checkpoint, as after a process that ended between the two."""
        if self._saver is None:
            return
        self._confirm()
        best, folder = self._validator.best, self._job.checkpoint.dir
        if best is None or not best.checkpoint:
            folder_at(folder).remove_file(BEST)  # of what was trained after the resumed one
            return
        try:
            if best_in(folder) != best.checkpoint:
                write_best(folder, best.checkpoint)
        except CheckpointError as error:
            logger.warning("the checkpoint of the best validation no longer exists: %s", error)

    def best(self) -> str | None:
        """Returns the url of the best validation's checkpoint; None: no validation, or nothing is saved.

        That of the best but one, if the best one's was lost with a server while it was written.
        """
        best, folder = self._validator.best, self._job.checkpoint.dir
        if self._saver is None or best is None or not best.checkpoint:
            return None
        self.write_best()
        name = best_in(folder)
        return None if name is None else folder_at(folder).child(name).url

    def _save(self, name: str, each: Pass, *, is_between_epochs: bool, named: list[str]) -> None:
        if self._saver is None or self._run.is_repeating:
            return  # repeating: the others have gone on since, and it would be of another moment
        attachments = self._attachments(each, is_between_epochs=is_between_epochs)
        self._saver.save(name, self._run.progress.steps, attachments, named=named)

    def _attachments(self, each: Pass, *, is_between_epochs: bool) -> dict[str, bytes]:
        state = RunState(
            epochs_done=each.number if is_between_epochs else each.number - 1,
            is_between_epochs=is_between_epochs,
            num_workers=self._run.num_workers,
            files=self._files,
            signature=self._plan.signatures["data.train"],
            order=order_of_data(self._job),
            validations=list(self._validator.validations),
            steps_since_validation=self._validator.steps.since,
        )
        self._saved_examples = self._run.store.status().num_examples
        attachments = attachments_of(self._job, self._plan.schema, self._values)
        return {**attachments, RUN_ATTACHMENT: state.to_json().encode()}


def _saver_of(job: Job, run: Run, earlier: EarlierRun | None, confirm: Callable[[], None]) -> Saver:
    settings, step = job.checkpoint, run.progress.steps
    is_gated = job.publish.is_gated
    new = partial(Saver, run.store, settings, step=step, is_gated=is_gated, confirm=confirm)
    new = partial(new, on_published=_on_published(job))
    if earlier is None:
        # The process before a replacement may have saved some of those that are there.
        is_to_overwrite = settings.overwrite and not run.is_replacement
        overwritten = checkpoints_of_runs(settings.dir) if is_to_overwrite else ()
        own = checkpoints_of_runs(settings.dir) if run.is_replacement else ()
        return new(overwritten=overwritten, own=own)
    return new(latest=earlier.url, own=checkpoints_of_runs(settings.dir))


def _on_published(job: Job) -> Callable[[str], object]:
    with job.errors("publish.notify", UsageError):
        return Channel(job.publish.notify).tell if job.publish.notify else str


def start_of(
    plan: Plan, run: Run, head: Callable[[], Iterable[Batch]], claim: Claim | None
) -> Start:
    """Returns what a run starts with; worker 0 loads it, and resumes the run that saved it if told to.

    No file is changed: what comes next may still be refused. `head` returns the first rows, which are read
    if the model starts at their click rate.

    Raises:
        JobError: If the job does not fit the checkpoint, or its folder has those of another run.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    files = digest_of_files(plan.train_files)
    if not run.is_first:
        return Start(files=files, claim=claim)
    job = plan.job
    _ = _on_published(job)
    _require_folder(job, run)
    signature = plan.signatures["data.train"]
    earlier = earlier_run(job, num_workers=run.num_workers, files=files, signature=signature)
    if run.is_replacement:  # the process before this one has loaded it
        return Start(files=files, claim=claim, earlier=earlier)
    if earlier is not None:
        url = earlier.url
        require_schema(job, plan.model, plan.schema, url, takes_dense=True, resumes=True)
        run.load(url, token=earlier.token)
        workers = range(run.num_workers)  # not heter trainers, which have no data to resume in
        progress = {worker: of for worker, of in earlier.progress.items() if worker in workers}
        run.resume(earlier.version, progress, batches=earlier.batches)
        return Start(files=files, claim=claim, earlier=earlier)
    warm_start = warm_start_of(job, plan.model)
    if warm_start is not None:
        url, takes_dense = warm_start.checkpoint, DENSE_BLOCK in warm_start.taken
        require_schema(job, plan.model, plan.schema, url, takes_dense=takes_dense)
        run.load(url, only=job.checkpoint.only, head=head())
    return Start(files=files, claim=claim, warm_start=warm_start)


def clear_folder(job: Job, run: Run, start: Start) -> None:
    """Removes what earlier runs left beside their checkpoints: files of unfinished saves, and `BEST`.

    A no-op on other workers than 0. For a run that has started, and that nothing will refuse. Raises
    CheckpointError if the folder cannot be read, or something in it cannot be removed.
    """
    folder = job.checkpoint.dir
    if not run.is_first or not folder:
        return
    start.confirm(run)
    is_fresh = start.earlier is None and not run.has_trained_before
    for name in remove_unfinished(folder):
        logger.info("removed files of an unfinished save: %s", name)
    if is_fresh:
        folder_at(folder).remove_file(BEST)  # an earlier run's, whose names this one saves again
    if name := begin_gate(folder, is_on=job.publish.is_gated, is_fresh=is_fresh):
        _on_published(job)(name)


def _require_folder(job: Job, run: Run) -> None:
    folder = job.checkpoint.dir
    if not folder:
        return
    if not run.is_replacement:  # else they are of this run
        require_free_folder(job)
    run.store.require_writable(folder)
