"""Summary of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ctr_model.models.model import Compute
from ps_worker.training.evaluation.evaluator import json_value


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
