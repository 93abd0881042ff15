"""Progressive validation: the figures of a pass over all workers, of predictions before training.

In the first pass they are of examples that the model had not seen: what it would have done online (Blum,
Kalai and Langford, "Beating the hold-out", 1999).
"""

import logging
from dataclasses import dataclass

from ctr_model.metrics import ClickMetrics
from protos.store import ReduceOp
from ps_worker.run.run import Run
from ps_worker.run.training_job.passes import Pass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFigures:
    """Figures of one pass.

    Attributes:
        epoch: Its number, from 1.
        examples: Of all workers; without those that a lost process had trained on, or the run before this one
            that it resumes.
        auc: nan with one class only.
        log_loss: Mean.
        base_log_loss: Of predicting the pass's click rate for each of its examples; nan with one class only.
        calibration: Predicted clicks over actual clicks; nan without clicks.
        train_seconds: Of all workers, waiting for the slowest included, without validations.
        examples_per_s: Of all workers, in these seconds.
    """

    epoch: int
    examples: int
    auc: float
    log_loss: float
    base_log_loss: float
    calibration: float
    train_seconds: float
    examples_per_s: float


def end_pass(run: Run, each: Pass) -> ClickMetrics:
    """Waits for all workers at the end of a pass; returns the metrics of all of them.

    The store has the gradients of all then. Where the run is repeating barriers, the figures are of no use:
    servers remember that the barrier was passed, and not its many numbers.
    """
    own = run.progress.of_pass()
    bounds = run.all_reduce(own.bounds(), ReduceOp.MAX, f"{each.name}-bounds")
    numbers = run.all_reduce(own.to_vector(bounds), ReduceOp.SUM, each.name, remember=False)
    return ClickMetrics.from_vector(numbers, bounds)


def figures_of_pass(run: Run, each: Pass, metrics: ClickMetrics, seconds: float) -> PassFigures:
    """Returns the figures of a pass, logs them, and warns of a log loss above that of the base rate."""
    figures = PassFigures(
        epoch=each.number,
        examples=metrics.examples,
        auc=metrics.auc(),
        log_loss=metrics.log_loss(),
        base_log_loss=metrics.base_log_loss(),
        calibration=metrics.calibration(),
        train_seconds=seconds,
        examples_per_s=metrics.examples / seconds if seconds > 0 else 0.0,
    )
    if run.is_first and figures.examples:
        logger.info(
            "pass epoch=%d examples=%d examples/s=%.0f auc=%.4f log_loss=%.5f base_log_loss=%.5f "
            "calibration=%.3f",
            figures.epoch,
            figures.examples,
            figures.examples_per_s,
            figures.auc,
            figures.log_loss,
            figures.base_log_loss,
            figures.calibration,
        )
        run.progress.warn_of_base_rate(metrics, f"the pass of epoch {each.number}")
    return figures
