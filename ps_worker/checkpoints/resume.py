"""Resuming: a run's progress in its checkpoints, and the newest one in a job's folder, if the job fits it.

A refused job would silently skip rows, train on some twice, train another model, or replace checkpoints of an
earlier run. Other settings, such as a lower learning rate, may differ: a warning names them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ctr_ps.protos.errors import CheckpointError, JobError, counted
from ctr_ps.protos.store import Version, WorkerProgress
from ctr_ps.ps_server.checkpoint.files.manifest import LATEST
from ctr_ps.ps_server.checkpoint.publish import require_replaceable
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.attachments import JOB_ATTACHMENT, job_of_checkpoint
from ctr_ps.ps_worker.checkpoints.retention import checkpoints_of_runs, unreadable_checkpoints
from ctr_ps.ps_worker.data.files.listing import difference_of
from ctr_ps.ps_worker.data.streams.stream_data import dealt_again, without_ends
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import order_of_data

logger = logging.getLogger(__name__)

RUN_ATTACHMENT = "run.json"

_COMPARED = ("model.", "data.", "train.", "optimizer.", "life.", "strategy.", "device.")
_FREE = frozenset(
    {"model.name", "data.train", "data.test", "data.valid", "train.epochs", "train.log_every_s"}
)
"""Settings of `_COMPARED` that may change in a resumed run, or have their own check."""

_MOST_LISTED = 10  # checkpoints in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """One evaluation on `data.valid`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    epoch: int  # the current epoch, or the one that it ended; from 1
    step: int  # steps of worker 0 before it
    auc: float | None  # None with one class only
    log_loss: float | None  # mean; None without rows
    # name in `checkpoint.dir` of the checkpoint of its model; empty: not the best, not saved
    checkpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run; the position of each worker in an unfinished epoch is in the manifest."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    epochs_done: int  # epochs that all workers have finished
    is_between_epochs: bool  # no worker has started another epoch
    num_workers: int  # workers of the run
    files: str  # digest of the training files (`digest_of_files`)
    order: Mapping[str, bool | int | str]  # order of the rows in the files, as `order_of_data`
    validations: list[Validation] = field(default_factory=list)  # all so far
    # of worker 0, in the unfinished epoch, where validations are due by steps
    steps_since_validation: int = 0
    signature: str = ""  # `signature_of` the files; empty: unknown

    def to_json(self) -> str:
        """Returns a text for `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: bytes, source: str) -> "RunState":
        """Returns the state that `to_json` wrote; a CheckpointError for another text names `source`."""
        try:
            return _RUN_STATE.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            fault = ": ".join(filter(None, (place, first["msg"])))
            raise CheckpointError(f"the run progress in {source} is invalid: {fault}") from error


_RUN_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """An earlier run, as of a checkpoint."""

    url: str
    token: str  # token of the save that wrote it
    version: Version
    batches: int  # batches of all workers in them
    progress: Mapping[int, WorkerProgress]  # progress of each worker in them
    state: RunState  # progress of the run


def earlier_run(
    job: Job, *, num_workers: int, files: str, signature: str = ""
) -> EarlierRun | None:
    """Returns the run to resume; None: the job does not ask for it, or its folder has no checkpoint.

    `files` is the `digest_of_files` of the training files, `signature` their `signature_of`, if known. Raises
    JobError, with a way out, if the job's data or workers are not those of the run, and CheckpointError if
    the newest checkpoint is damaged, or no job saved it.
    """
    if not job.checkpoint.resume:
        return None
    place = _newest(job.checkpoint.dir)
    if place is None:
        return None
    checkpoint = Checkpoint.open(place)
    run = _run_of(checkpoint)
    run = replace(run, progress=without_ends(run.progress))
    _require_same_data(job, run, files, signature)
    compare_settings(job, checkpoint, resumes=True)
    is_stream = job.data.stream and any(each.partitions for each in run.progress.values())
    if is_stream and run.state.num_workers != num_workers:
        _warn_of_other_workers(job, run, num_workers)
        return replace(run, progress=dealt_again(run.progress, num_workers))
    if run.state.is_between_epochs:
        _warn_of_other_workers(job, run, num_workers)
        progress = {worker: run.progress[worker] for worker in run.progress if worker < num_workers}
        return replace(run, progress=progress)
    _require_same_workers(job, run, num_workers)
    _require_positions(job, run)
    return run


def _newest(folder: str) -> str | None:
    """Returns the url of the newest checkpoint; None without any.

    Without LATEST, which is written after a checkpoint and may be missing, the manifests decide. Raises
    CheckpointError if all are unreadable: a fresh run would replace them.
    """
    if (root := folder_at(folder)).has(LATEST):
        return f"{root.url}/{LATEST}"
    names = checkpoints_of_runs(folder)
    unreadable = unreadable_checkpoints(folder, names)
    if unreadable and not names:
        raise CheckpointError(
            f"{folder} has only unreadable checkpoints, {', '.join(unreadable)}: remove them to start "
            "fresh, or choose another checkpoint.dir"
        )
    if not names:
        return None
    logger.warning(
        "%s has no LATEST: resuming from the newest of %d checkpoints, %s",
        folder,
        len(names),
        names[-1],
    )
    return folder_at(folder).child(names[-1]).url


def require_batches(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if it has steps of no known number of batches: schedules would start over."""
    manifest = checkpoint.manifest
    if manifest.version and not manifest.batches:
        raise CheckpointError(
            f"{checkpoint.url} does not record the number of batches behind its "
            f"{counted(manifest.version, 'applied step')}, so no run can resume from it: "
            f"{_fresh_from(checkpoint.url)}"
        )


def _run_of(checkpoint: Checkpoint) -> EarlierRun:
    if RUN_ATTACHMENT not in checkpoint.attachments:
        raise CheckpointError(
            f"{checkpoint.url} has no run progress, so no run can resume from it: "
            f"{_fresh_from(checkpoint.url)}"
        )
    text = checkpoint.attachment(RUN_ATTACHMENT)
    require_batches(checkpoint)
    return EarlierRun(
        url=checkpoint.url,
        token=checkpoint.token,
        version=checkpoint.manifest.version,
        batches=checkpoint.manifest.batches,
        progress=checkpoint.manifest.workers,
        state=RunState.from_json(text, checkpoint.attachment_url(RUN_ATTACHMENT)),
    )


def _require_same_data(job: Job, run: EarlierRun, files: str, signature: str) -> None:
    if run.state.files != files:
        raise job.error(
            "data.train",
            f"the run in {run.url} trained on other files, or in another order, so it cannot be resumed: "
            f"{_fresh_from(run.url)}",
        )
    is_known = bool(run.state.signature and signature)
    if is_known and (difference := difference_of(run.state.signature, signature)):
        raise job.error(
            "data.train",
            f"files have changed since the run in {run.url} trained on them, so it cannot be resumed: "
            f"{difference}. Restore the files; or, {_fresh_from(run.url)}",
        )
    order = order_of_data(job)
    for key in {**order, **run.state.order}:
        value, was = order.get(key), run.state.order.get(key)
        if was != value:
            raise _other(job, key, value, was, run.url, "read its data in another order")


def _other(job: Job, key: str, value: object, was: object, url: str, why: str) -> JobError:
    fault = f"it is {value!r}, but was {was!r} in the run in {url}, which {why}, so it cannot be resumed"
    return job.error(key, f"{fault}: write {was!r}; or, {_fresh_from(url)}")


def compare_settings(job: Job, checkpoint: Checkpoint, *, resumes: bool) -> None:
    """Warns of other settings than those of the run, in a new one of other options of its model.

    Equal shapes do not tell them. Refuses to resume another model, or one that learns other labels.
    """
    if not resumes and JOB_ATTACHMENT not in checkpoint.attachments:
        return
    try:
        saved = job_of_checkpoint(checkpoint)
    except (CheckpointError, JobError) as error:
        logger.warning(
            "cannot compare this job's settings with those of the run in %s: %s",
            checkpoint.url,
            error,
        )
        return
    for key, before, after in (
        ("model.name", saved.model.name, job.model.name),
        ("train.delay", saved.train.delay, job.train.delay),
    ):
        # A file of the user's may have moved.
        if resumes and PurePath(before).name != PurePath(after).name:
            raise _other(job, key, after, before, checkpoint.url, "learns something else")
    groups = _COMPARED if resumes else ("model.", "train.delay")
    was, now = _settings(saved, groups), _settings(job, groups)
    differing = [key for key in {**now, **was} if now.get(key) != was.get(key)]
    if saved.strategy.mode != job.strategy.mode:  # the settings of two modes cannot be compared
        others = (f"strategy.{saved.strategy.mode}.", f"strategy.{job.strategy.mode}.")
        differing = [key for key in differing if not key.startswith(others)]
    if differing:
        logger.warning(
            "%s %s with other settings: %s",
            "resuming" if resumes else "starting from",
            checkpoint.url,
            ", ".join(f"{key} = {_shown(now, key)}, was {_shown(was, key)}" for key in differing),
        )


def _settings(job: Job, groups: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings of a job in `groups` that affect learning, by key."""
    found = job.settings()
    return {key: found[key] for key in found if key.startswith(groups) and key not in _FREE}


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "not set"


def _warn_of_other_workers(job: Job, run: EarlierRun, num_workers: int) -> None:
    """Warns of the effects of another number of workers: the loss may shift."""
    was = run.state.num_workers
    if was == num_workers:
        return
    if job.strategy.is_sync:
        change = f"a step has {num_workers} batches, not {was}"
    else:
        change = (
            f"gradients have the staleness of {counted(num_workers, 'worker')}: if the loss rises, lower "
            "the learning rates"
        )
    logger.warning(
        "%s was saved with %s and is resumed with %d: %s",
        run.url,
        counted(was, "worker"),
        num_workers,
        change,
    )


def _require_same_workers(job: Job, run: EarlierRun, num_workers: int) -> None:
    if run.state.num_workers != num_workers:
        raise job.error(
            "checkpoint.resume",
            f"the run in {run.url} ended in epoch {run.state.epochs_done + 1}, whose rows were distributed "
            f"to {counted(run.state.num_workers, 'worker')}, but now the job has {num_workers}: start that "
            "number of workers, or write the name of a checkpoint between two epochs into "
            f"{job.checkpoint.dir}/LATEST; {_fresh_from(run.url)}",
        )


def _require_positions(job: Job, run: EarlierRun) -> None:
    unknown = [
        worker for worker, each in run.progress.items() if each.step > 0 and not each.position
    ]
    if unknown:
        raise job.error(
            "checkpoint.resume",
            f"the run in {run.url} has no data positions of workers {unknown}, as rows of several readers "
            f"have no order (data.reader_num); {_fresh_from(run.url)}",
        )


def _fresh_from(url: str) -> str:
    return (
        f"to start a fresh run from its model, set checkpoint.resume = false, checkpoint.load = {url!r} and "
        f"another checkpoint.dir"
    )


def require_free_folder(job: Job) -> None:
    """Refuses to start a fresh run where an earlier one has saved: it would replace checkpoints.

    Not for a replacement process, whose own run saved them. Raises JobError, which describes them, if there
    are any, and the job sets neither `checkpoint.resume` nor `checkpoint.overwrite`; unreadable ones count,
    as they may be of another release. Raises CheckpointError if the folder cannot be read, or has one that
    not even `overwrite` could replace.
    """
    settings = job.checkpoint
    if not settings.dir or settings.resume:
        return
    names = checkpoints_of_runs(settings.dir)
    unreadable = unreadable_checkpoints(settings.dir, names)
    if settings.overwrite:
        for name in unreadable:  # now, and not when the run comes to save under its name
            require_replaceable(folder_at(settings.dir).child(name))
    elif names or unreadable:
        described = [_of_newest(settings.dir, names)] if names else []
        if unreadable:
            described.append(f"{', '.join(unreadable[-_MOST_LISTED:])} cannot be read")
        raise job.error(
            "checkpoint.dir",
            f"{settings.dir} has checkpoints of an earlier run ({'; '.join(described)}), and this run, of "
            f"model {job.model.name!r}, would add its own: set checkpoint.resume = true to resume the "
            "earlier run, checkpoint.overwrite = true to replace its checkpoints, or another checkpoint.dir",
        )


def _of_newest(folder: str, names: list[str]) -> str:
    """Returns the progress of a run's newest checkpoint, and the names of the last ones."""
    older = len(names) - _MOST_LISTED
    listed = ", ".join(names[-_MOST_LISTED:])
    listed = f"{older} older ones, {listed}" if older > 0 else listed
    try:
        newest = Checkpoint.open(folder_at(folder).child(names[-1]).url)
        model = newest.json_attachment(JOB_ATTACHMENT)["model"]["name"]
        state = RunState.from_json(newest.attachment(RUN_ATTACHMENT), newest.url)
    except (CheckpointError, TypeError, KeyError):  # damaged, or saved by a script
        return listed
    return f"model {model!r}, {counted(state.epochs_done, 'epoch')} done: {listed}"
