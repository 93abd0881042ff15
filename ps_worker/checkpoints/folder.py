"""The folder of a fresh run: its own, or one with checkpoints of an earlier run."""

from ctr_ps.protos.errors import CheckpointError, counted
from ctr_ps.ps_server.checkpoint.publish import require_replaceable
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.attachments import JOB_ATTACHMENT
from ctr_ps.ps_worker.checkpoints.retention import checkpoints_of_runs, unreadable_checkpoints
from ctr_ps.ps_worker.checkpoints.run_state import RUN_ATTACHMENT, RunState
from ctr_ps.ps_worker.job import Job

_MOST_LISTED = 10


def require_free_folder(job: Job) -> None:
    """Refuses to start a fresh run where an earlier one has saved: it would replace checkpoints.

    Not for a replacement process, whose own run saved them. Unreadable checkpoints count: they may be of
    another release.

    Raises:
        JobError: If there are checkpoints of a run, and the job sets neither `checkpoint.resume` nor
            `checkpoint.overwrite`; describes them.
        CheckpointError: If the folder cannot be read, or has one that not even `overwrite` could replace.
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
        described = _described(settings.dir, names, unreadable)
        raise job.error(
            "checkpoint.dir",
            f"{settings.dir} has checkpoints of an earlier run ({described}), and this run, of model "
            f"{job.model.name!r}, would mix its own with them: set checkpoint.resume = true to resume the "
            f"earlier run, checkpoint.overwrite = true to replace its checkpoints, or another checkpoint.dir",
        )


def _described(folder: str, names: list[str], unreadable: list[str]) -> str:
    """Returns the progress of a run's newest checkpoint, and the names of the last ones."""
    listed = [_of_newest(folder, names)] if names else []
    if unreadable:
        listed.append(f"{', '.join(unreadable[-_MOST_LISTED:])} cannot be read")
    return "; ".join(listed)


def _of_newest(folder: str, names: list[str]) -> str:
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
