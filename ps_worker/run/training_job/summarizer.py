"""End of a training job: the final evaluation, and the summary."""

import logging
from dataclasses import asdict, replace
from typing import Any

from protos.store import StoreStatus
from ps_server.checkpoint.reader import Checkpoint
from ps_worker.checkpoints.warm_start import WarmStart
from ps_worker.run.plan import Plan
from ps_worker.run.run import Run
from ps_worker.run.training_job.checkpoints import JobCheckpoints
from ps_worker.run.training_job.final_evaluation import final_evaluation, warn_of
from ps_worker.run.training_job.metrics_writer import MetricsWriter
from ps_worker.run.training_job.summary import Summary
from ps_worker.run.training_job.training import Trained
from ps_worker.run.training_job.validation.validations import Validations

logger = logging.getLogger(__name__)


class Summarizer:
    """Evaluates and summarizes a run that was trained. For one thread."""

    def __init__(
        self,
        plan: Plan,
        run: Run,
        metrics: MetricsWriter,
        validations: Validations,
        checkpoints: JobCheckpoints,
    ) -> None:
        """Evaluates nothing yet."""
        self._plan = plan
        self._job = plan.job
        self._run = run
        self._metrics = metrics
        self._validations = validations
        self._checkpoints = checkpoints

    def summarize(self, trained: Trained, bad_rows: int, warm_start: WarmStart | None) -> Summary:
        """Returns the figures; those of all workers, and of the evaluation, on worker 0 alone.

        Args:
            trained: What training has come to.
            bad_rows: Malformed rows that this worker skipped in an epoch.
            warm_start: What the run took from another one's checkpoint.
        """
        own = self._own(trained, bad_rows)
        if not self._run.is_first:
            return replace(own, examples=self._run.progress.examples)
        status = self._run.store.status()
        lost = self._lost_workers(status)
        examples = sum(status.examples.values())
        best = self._checkpoints.best()
        is_final = self._job.valid.final_model == "best"
        final = Checkpoint.open(best) if best and is_final else None
        evaluation = self._evaluation(final, trained)
        summary = replace(
            own,
            **evaluation,
            examples=examples,
            examples_per_s=trained.examples_per_s,
            staleness=status.staleness.as_dict(),
            duplicates=status.duplicates,
            lost_workers=lost,
            tables={name: asdict(table) for name, table in status.tables.items()},
            model_digest=self._digest(final),
            checkpoint=self._checkpoints.latest,
            warm_start=None if warm_start is None else asdict(warm_start),
            validations=self._validations.as_dicts(),
            best=self._best_figures(best),
        )
        ends = ("examples", "examples_per_s", "model_digest", "checkpoint", "best", "stopped_early")
        self._metrics.write("end", {name: getattr(summary, name) for name in ends})
        return summary

    def _own(self, trained: Trained, bad_rows: int) -> Summary:
        """Returns the figures that each worker knows of itself."""
        return Summary(
            compute=self._job.train.compute,
            train_loss=self._run.progress.mean_loss,
            bad_rows=bad_rows,
            skipped_batches=self._run.non_finite.skipped,
            skipped_by_name=self._run.non_finite.by_name,
            passes=[asdict(each) for each in trained.passes],
            stopped_early=trained.stopped_early,
        )

    def _lost_workers(self, status: StoreStatus) -> list[int]:
        """Returns the workers that were lost; not heter trainers, which have no data."""
        lost = sorted(worker for worker in status.lost if worker < self._run.num_workers)
        if lost:
            logger.warning(
                "workers %s were lost: what was left of their data was not trained on", lost
            )
        return lost

    def _evaluation(self, final: Checkpoint | None, trained: Trained) -> dict[str, Any]:
        """Returns the figures of `data.test`; see `final_evaluation`."""
        evaluation = final_evaluation(self._plan, self._run, final)
        if evaluation:
            self._metrics.write("test", evaluation)
            in_process = self._run.is_in_process
            warn_of(evaluation, self._job, trained.passes, is_in_process=in_process)
        return evaluation

    def _digest(self, final: Checkpoint | None) -> str:
        return self._run.store.digest() if final is None else final.digest_of_files()

    def _best_figures(self, url: str | None) -> dict[str, Any] | None:
        best = self._validations.best
        return None if best is None else {**asdict(best), "checkpoint": url}
