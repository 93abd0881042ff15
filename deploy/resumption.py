"""From what a job is started again: its newest checkpoint, if this run has saved one.

<folder>/LATEST                       name of the newest
<folder>/<name>/MANIFEST.json         which save wrote it: its data folder
"""

import json
from dataclasses import dataclass

import fsspec


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest checkpoint of a folder: its name, and what no other save has."""

    name: str
    save: str


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """From what a job goes on: options of its workers' command line, and words for a message."""

    options: tuple[str, ...]
    text: str


class Resumption:
    """What a restarted job of a folder of checkpoints resumes from.

    A run that did not ask to resume must not go on from a checkpoint of an earlier run, which may have the
    names of its own: what is there before the first start is remembered.
    """

    def __init__(self, folder: str, *, is_asked: bool, has_metrics: bool = False) -> None:
        """Looks into the folder, which need not exist.

        Args:
            folder: `checkpoint.dir` of the job, a path or a URL.
            is_asked: Whether the job itself says `checkpoint.resume = true`.
            has_metrics: Whether the job has a `run.dir`.
        """
        self._folder = folder
        self._has_metrics = has_metrics
        self._earlier = None if is_asked else newest(folder)

    def look(self) -> ResumePoint:
        """Returns from what a restart goes on now."""
        found = newest(self._folder)
        if found is None:
            # Without LATEST a job finds a checkpoint that the run was just saving, or starts fresh.
            return ResumePoint(_resume(True), f"the start: {self._folder} has no checkpoint yet")
        if found == self._earlier:
            text = f"the start: {found.name} in {self._folder} is of an earlier run"
            # The metrics there are of this run, which the first start would not have replaced unasked.
            replaces = ("--set", "run.overwrite=true") if self._has_metrics else ()
            return ResumePoint((*_resume(False), *replaces), text)
        return ResumePoint(_resume(True), f"{self._folder}/{found.name}")


def newest(folder: str) -> Newest | None:
    """Returns the newest checkpoint of a folder; None: there is none that can be read."""
    try:
        files, path = fsspec.url_to_fs(folder)
        name = files.cat_file(f"{path}/LATEST").decode().strip()
        manifest = json.loads(files.cat_file(f"{path}/{name}/MANIFEST.json"))
        return Newest(name, str(manifest["data_folder"]))
    except Exception:  # each kind of storage has errors of its own
        return None


def _resume(is_wanted: bool) -> tuple[str, str]:
    return ("--set", f"checkpoint.resume={str(is_wanted).lower()}")
