"""End of a training job: the evaluation on `data.test`, and the summary."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ctr_ps.ctr_model.models.model import Compute
from ctr_ps.protos.store import StoreStatus
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.warm_start import WarmStart
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints
from ctr_ps.ps_worker.run.training_job.metrics_writer import MetricsWriter
from ctr_ps.ps_worker.run.training_job.training import Trained
from ctr_ps.ps_worker.run.training_job.validation import Validations
from ctr_ps.ps_worker.training.evaluation.advice import warning_of_test
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.evaluator import evaluate, figures, json_value
from ctr_ps.ps_worker.training.evaluation.saved_store import SavedStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run; those of the evaluation on worker 0 only, None elsewhere.

    Attributes:
        auc: Area under the ROC curve on the test data.
        log_loss: Mean on the test data.
        base_log_loss: Of predicting the click rate of the test data for each of its rows.
        accuracy: At threshold 0.5, on the test data.
        calibration: Predicted clicks over actual clicks, on the test data.
        test_examples: Rows evaluated.
        tasks: By name of a task, these figures for a model of several labels; those above are of its first.
        calibration_error: Mean distance of predicted and actual click rate over `calibration_buckets`.
        calibration_buckets: Predicted and actual click rates by ascending prediction.
        gauc: AUC within the groups of `valid.group_by`, weighted by their examples.
        groups: The numbers of groups and examples in it, and of those left out.
        slices: By slot of `valid.slices`: figures of its most frequent values.
        examples: Examples trained on, over all workers.
        examples_per_s: Of all workers, while training: without loading, saving and evaluating.
        compute: Precision of matrix products in training; the evaluation is in float32.
        train_loss: Mean over this worker's examples, each predicted before it was trained on.
        bad_rows: Malformed rows that this worker skipped in an epoch.
        skipped_batches: Batches that this worker skipped, as their loss or gradients were not finite.
        skipped_by_name: The same by table or dense block whose gradient that was, and "loss".
        staleness: Steps of other workers between the pull and the push of a batch, over all workers.
        duplicates: Pushes that came to a server again, since their answer was lost; they count once.
        lost_workers: Workers that were lost, so that the others went on without them: what was left of their
            data was not trained on.
        tables: By table: rows, bytes, and the rows that expired or were evicted.
        model_digest: SHA-256 of the trained model.
        checkpoint: Folder of the last checkpoint.
        passes: Figures of each pass over all workers, as `PassFigures`: their examples were predicted before
            they were trained on.
        validations: On `data.valid`, in their order: epoch, step, AUC, log loss, and the name of the
            checkpoint if it was the best so far.
        best: The best of them, with the url of its checkpoint.
        stopped_early: Training ended since validations got no better.
        warm_start: The checkpoint that the run started from, the tables taken and those with initial values.
    """

    auc: float | None = None
    log_loss: float | None = None
    base_log_loss: float | None = None
    accuracy: float | None = None
    calibration: float | None = None
    test_examples: int = 0
    tasks: Mapping[str, Mapping[str, object]] | None = None
    calibration_error: float | None = None
    calibration_buckets: Sequence[Mapping[str, object]] | None = None
    gauc: float | None = None
    groups: Mapping[str, object] | None = None
    slices: Mapping[str, object] | None = None
    examples: int = 0
    examples_per_s: float = 0.0
    compute: Compute = "float32"
    train_loss: float | None = None
    bad_rows: int = 0
    skipped_batches: int = 0
    skipped_by_name: Mapping[str, int] = field(default_factory=dict)
    staleness: Mapping[str, object] | None = None
    duplicates: int | None = None
    lost_workers: Sequence[int] | None = None
    tables: Mapping[str, Mapping[str, int]] | None = None
    model_digest: str | None = None
    checkpoint: str | None = None
    passes: Sequence[Mapping[str, object]] = ()
    validations: Sequence[Mapping[str, object]] = ()
    best: Mapping[str, object] | None = None
    stopped_early: bool = False
    warm_start: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """Returns the fields; NaN becomes None, as JSON has no NaN."""
        return {name: json_value(value) for name, value in asdict(self).items()}


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
        """Returns the figures of `data.test`, of the `final` model or, if None, of the last step's."""
        plan, run = self._plan, self._run
        if not plan.test_files:
            return {}
        dataset = evaluated(plan.job, plan.schema, plan.test_files, plan.stamps)
        breakdown = breakdown_of(plan.job, plan.schema, plan.test_files)()
        if final is None:
            metrics = run.evaluate(dataset, breakdown=breakdown)
        else:
            metrics = evaluate(
                SavedStore(SavedModel(final, maps=True, verifies=True)),
                plan.model,
                dataset,
                batch_size=plan.job.train.batch_size,
                num_threads=plan.job.train.thread_num,
                breakdown=breakdown,
            )
        if not metrics.examples:
            logger.warning(
                "nothing was evaluated: the files of data.test have no rows with a label"
            )
        evaluation = figures(metrics, breakdown)
        self._metrics.write("test", evaluation)
        self._warn_of(evaluation, trained)
        return evaluation

    def _warn_of(self, evaluation: Mapping[str, Any], trained: Trained) -> None:
        """Says so if the model knows less of `data.test` than its click rate."""
        last = trained.passes[-1] if trained.passes else None
        warning = warning_of_test(
            self._job,
            log_loss=evaluation["log_loss"],
            base_log_loss=evaluation["base_log_loss"],
            is_learnt=last is not None and last.log_loss < last.base_log_loss,
            is_in_process=self._run.is_in_process,
        )
        if warning:
            logger.warning("%s", warning)

    def _digest(self, final: Checkpoint | None) -> str:
        return self._run.store.digest() if final is None else final.digest_of_files()

    def _best_figures(self, url: str | None) -> dict[str, Any] | None:
        best = self._validations.best
        return None if best is None else {**asdict(best), "checkpoint": url}
