"""The folder of a run, `run.dir`: what it has measured, for people and for tools.

    metrics.jsonl    one JSON object a line: kind, time, epoch, step, figures (docs/evaluation.md)
    job.json         the job as it was understood
    events.out.*     the same figures for TensorBoard, if the extra is installed

Each line is whole and in the file when it is written, so that a run can be followed, and one that was killed
has all of its lines; it may leave a torn one, which the run that resumes it removes. Of a line that does not
fit on the disk nothing stays.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Self, cast

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.files.content import write_text
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.training.evaluation.evaluator import json_value

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
JOB = "job.json"
_EVENTS = "events.out.tfevents.*"

Kind = Literal["start", "train", "valid", "pass", "publish", "test", "end"]


class RunFolder(AbstractContextManager["RunFolder"]):
    """Writes the figures of one run. Thread-safe: lines of several threads do not mix."""

    def __init__(self, job: Job, *, is_continued: bool) -> None:
        """Changes nothing yet: a run that is refused afterwards leaves the folder as it is.

        With `is_continued`, metrics that are there are of this run, which resumes or has another process now.
        Raises JobError if it has the metrics of another run.
        """
        self._job = job
        self._is_continued = is_continued
        self._lock = threading.Lock()
        folder = Path(job.run.dir)
        metrics = folder / METRICS
        if not is_continued and not job.run.overwrite and _has_a_line(metrics):
            raise job.error(
                "run.dir",
                f"{metrics} has the metrics of an earlier run: choose another folder, set checkpoint.resume "
                "= true to resume that run and append to them, or run.overwrite = true to replace them",
            )

    def __enter__(self) -> Self:
        """Opens the folder, and makes it if it does not exist.

        Raises UsageError if it cannot be written to.
        """
        folder = Path(self._job.run.dir)
        metrics = folder / METRICS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self._is_continued:
                for old in [*folder.glob(_EVENTS), *folder.glob(METRICS)]:
                    old.unlink()
            _remove_torn_line(metrics)
            write_text(folder / JOB, self._job.to_json())
            # Past Python's buffer: no kill loses a line.
            self._file = os.open(metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(
                f"{self._job.place_of('run.dir')}: run.dir: cannot write to {str(folder)!r}: {error.strerror}"
            ) from error
        self._events = _events_in(folder)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
        if self._events is not None:
            self._events.close()

    def write(self, kind: Kind, *, epoch: int, step: int, figures: Mapping[str, Any]) -> None:
        """Writes one line, and its numbers for TensorBoard; those that are nan or infinite become null."""
        now = time.time()
        record = {"kind": kind, "time": now, "epoch": epoch, "step": step, **figures}
        line = json.dumps(json_value(record), allow_nan=False)
        try:
            with self._lock:
                _append(self._file, f"{line}\n".encode())
            if self._events is not None and kind not in ("start", "end"):
                for name, value in _numbers(figures):
                    self._events.add_scalar(f"{kind}/{name}", value, step, now)
                if kind != "train":
                    self._events.flush()
        except OSError as error:  # as when the disk is full: the model matters more
            logger.warning("figures of %s step=%d are not written: %s", kind, step, error)


def _has_a_line(metrics: Path) -> bool:
    """Whether a run has measured something: a process that ends before it has started leaves no line."""
    try:
        with metrics.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return metrics.exists()


def _append(file: int, line: bytes) -> None:
    """Writes a line, in parts if the system takes no more at once; all of it, or nothing."""
    size = os.fstat(file).st_size
    try:
        while line:
            line = line[os.write(file, line) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file, size)
        raise


def _remove_torn_line(metrics: Path) -> None:
    if metrics.exists():
        content = metrics.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(metrics, whole)


def _events_in(folder: Path) -> Any:
    # It imports PyTorch, if that is installed, for types that are not used here: 300 MB.
    is_known = "torch" in sys.modules
    sys.modules.setdefault("torch", cast("ModuleType", None))
    try:
        from tensorboardX import SummaryWriter  # late: an extra
    except ImportError:
        logger.info(
            "no TensorBoard events are written to %s: pip install 'ctr-ps[tensorboard]'", folder
        )
        return None
    finally:
        if not is_known:
            del sys.modules["torch"]
    return SummaryWriter(str(folder))


def _numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields the finite numbers in nested figures, by their path: the writer of events warns of others."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            yield f"{prefix}{name}", float(value)


@dataclass(slots=True)
class MetricsWriter:
    """Writes the figures of a run, each line with the epoch and the step that the run is at.

    A no-op on a worker that has no folder for them. Any thread may write; `epoch` is for the one that goes
    from pass to pass.
    """

    folder: RunFolder | None
    run: Run
    epoch: int = 0  # the current one, from 1; 0: before the first

    def write(self, kind: Kind, figures: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one line; see `RunFolder.write`. `step` None is the step that the run is at."""
        if self.folder is not None:
            step = self.run.progress.steps if step is None else step
            self.folder.write(kind, epoch=self.epoch, step=step, figures=figures)
