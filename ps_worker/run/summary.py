"""Summary of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ctr_model.models.model import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run; those of the evaluation on worker 0 only, None elsewhere.

    Attributes:
        auc: Area under the ROC curve on the test data.
        log_loss: Mean on the test data.
        accuracy: At threshold 0.5, on the test data.
        calibration: Predicted clicks over actual clicks, on the test data.
        test_examples: Rows evaluated.
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
        warm_start: The checkpoint that the run started from, the tables taken and those with initial values.
    """

    auc: float | None = None
    log_loss: float | None = None
    accuracy: float | None = None
    calibration: float | None = None
    test_examples: int = 0
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
    warm_start: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """Returns the fields; NaN becomes None, as JSON has no NaN."""
        return {name: _or_none(value) for name, value in asdict(self).items()}


def _or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
