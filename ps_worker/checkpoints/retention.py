"""Retention: the checkpoints of runs in a folder, and the removal of old ones.

    epoch-<number>, step-<number>[-<number>]    saved by runs, this one or an earlier one
    any other name, kind inference              saved by people

A run removes only its own; with `overwrite` also those of an earlier run, once it has saved its first.
"""

import re
from collections.abc import Collection

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST
from ctr_ps.ps_server.checkpoint.publish import (
    keep_last,
    manifests_in,
    read_manifest,
    remove_checkpoints,
)
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at, place_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.sections import CheckpointSection

_NAME_OF_RUN = re.compile(r"epoch-[0-9]+|step-[0-9]+(-[0-9]+)?")

KEPT_PASSES = 2
"""With a gate these stay, so that a person can publish what was held."""


def name_after_epoch(epoch: int) -> str:
    """Returns the name of the checkpoint that ends an epoch, counted from 1."""
    return f"epoch-{epoch}"


def name_at_step(step: int, number: int = 1) -> str:
    """Returns the name of a checkpoint within an epoch, after `step` steps of worker 0.

    `number` is that of the validation at this step: worker 0 may stay at it while others have data left.
    """
    return f"step-{step}" if number == 1 else f"step-{step}-{number}"


def checkpoints_of_runs(folder: str) -> list[str]:
    """Returns the names of the runs' checkpoints in a folder, the oldest first; raises CheckpointError."""
    return [
        name
        for name, manifest in manifests_in(folder).items()
        if _NAME_OF_RUN.fullmatch(name) and manifest.kind != "inference"
    ]


def unreadable_checkpoints(folder: str, readable: Collection[str]) -> list[str]:
    """Returns the runs' checkpoints in a folder that are not in `readable`, those of `checkpoints_of_runs`.

    Each is damaged, of another release, or temporarily unreadable. Raises CheckpointError for an unreadable
    folder.
    """
    root = folder_at(folder)
    others = [
        name for name in root.folders() if _NAME_OF_RUN.fullmatch(name) and name not in readable
    ]
    return [name for name in others if _is_there(root.child(name))]


def _is_there(checkpoint: Folder) -> bool:
    try:
        return checkpoint.has(MANIFEST) and read_manifest(checkpoint).kind != "inference"
    except CheckpointError:
        return True


class Keeper:
    """Removes the old checkpoints of one run. Not thread-safe."""

    def __init__(
        self,
        settings: CheckpointSection,
        own: Collection[str],
        overwritten: Collection[str] = (),
        passes: int = 0,
    ) -> None:
        """Takes the run's own names, oldest first, and those to overwrite; keeps the ends of `passes`."""
        self._settings = settings
        self._own = dict.fromkeys(own)
        self._passes = passes
        self._overwritten = set(overwritten)
        self._started_from = _name_in(settings.dir, settings.load)

    def saved(self, name: str) -> None:
        """Counts a new checkpoint; removes those to overwrite, and the oldest own ones beyond the limit.

        Raises CheckpointError if the folder cannot be read, or one cannot be removed.
        """
        self._own.pop(name, None)
        self._own[name] = None  # the newest
        overwritten, self._overwritten = self._overwritten - self._own.keys(), set()
        if overwritten:
            remove_checkpoints(self._settings.dir, overwritten - {self._started_from})
        ends = [each for each in self._own if each.startswith("epoch-")]
        kept = {self._started_from, *ends[len(ends) - self._passes :]}
        old = self._own.keys() - kept
        for each in keep_last(self._settings.dir, self._settings.keep_last, old):
            del self._own[each]


def _name_in(folder: str, checkpoint: str) -> str | None:
    """Returns the name of a checkpoint that is in a folder; None: it is elsewhere, or the folder itself."""
    if not checkpoint:
        return None
    place, _, name = place_of(checkpoint).rpartition("/")
    return name if place == place_of(folder) else None


def require_other_folder(job: Job) -> None:
    """Refuses deltas in the folder of the checkpoint that they start from, as they may replace its files.

    Raises JobError if `checkpoint.load` is in `checkpoint.dir`, CheckpointError if one of the two is no place
    of a checkpoint.
    """
    checkpoint = job.checkpoint
    if checkpoint.mode == "full" or checkpoint.resume or not checkpoint.load:
        return
    is_folder = place_of(checkpoint.load) == place_of(checkpoint.dir)
    if is_folder or _name_in(checkpoint.dir, checkpoint.load) is not None:
        raise job.error(
            "checkpoint.load",
            f"checkpoint.load is {checkpoint.load!r}, in checkpoint.dir, where this run would replace "
            "checkpoints that it needs: choose another checkpoint.dir to start a fresh run from this model, "
            "or set checkpoint.resume = true to resume its run",
        )
