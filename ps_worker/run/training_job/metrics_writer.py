"""The lines of metrics.jsonl, each with the epoch and the step that the run is at."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ctr_ps.ps_worker.run.figures.run_folder import Kind, RunFolder
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.passes import PassFigures


class MetricsWriter:
    """Writes the figures of a run; a no-op on a worker that has no folder for them.

    Any thread may write; `epoch` is for the one that goes from pass to pass.

    Attributes:
        epoch: The current one, from 1; 0: before the first.
    """

    def __init__(self, folder: RunFolder | None, run: Run) -> None:
        """Writes nothing yet."""
        self._folder = folder
        self._run = run
        self.epoch = 0

    def write(self, kind: Kind, figures: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one line; see `RunFolder.write`. `step` None is the step that the run is at."""
        if self._folder is not None:
            step = self._run.progress.steps if step is None else step
            self._folder.write(kind, epoch=self.epoch, step=step, figures=figures)

    def write_pass(self, figures: PassFigures, *, wait_seconds: float, threads: int) -> None:
        """Writes the figures of a pass, and where its time and the memory of tables went.

        Args:
            figures: Of all workers.
            wait_seconds: For which this worker waited for others at the end of the pass.
            threads: Training threads of this worker.
        """
        if self._folder is None:
            return
        status, times = self._run.store.status(), self._run.progress.times.take()
        more: dict[str, Any] = {
            "seconds": {**times, "wait": wait_seconds},
            "threads": threads,
            "tables": {name: asdict(table) for name, table in status.tables.items()},
            "staleness": status.staleness.as_dict(),
        }
        self.write("pass", {**asdict(figures), **more})
