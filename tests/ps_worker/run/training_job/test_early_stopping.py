"""When validations say that training is to stop."""

import pytest

from ctr_ps.ps_worker.checkpoints.resume import Validation
from ctr_ps.ps_worker.run.training_job.validation import EarlyStopping


def of(auc: float | None, log_loss: float) -> Validation:
    return Validation(epoch=1, step=1, auc=auc, log_loss=log_loss)


def after(rule: EarlyStopping, *figures: tuple[float | None, float]) -> EarlyStopping:
    """Returns the rule after validations of (AUC, log loss)."""
    for each in figures:
        rule = rule.after(of(*each))
    return rule


@pytest.mark.parametrize(
    ("metric", "waits"), [("log_loss", [0, 1, 0, 1, 2]), ("auc", [0, 0, 1, 2, 3])]
)
def test_metric_decides_which_validation_is_better(metric, waits) -> None:
    figures = [(0.7, 0.5), (0.8, 0.6), (0.75, 0.4), (0.6, 0.45), (0.79, 0.7)]

    told = [
        after(EarlyStopping(metric=metric, patience=0), *figures[:end]).waits for end in range(1, 6)
    ]

    assert told == waits


def test_patience_counts_validations_since_the_best() -> None:
    rule = EarlyStopping(metric="log_loss", patience=2)

    assert not after(rule, (0.5, 0.3), (0.5, 0.4)).is_over
    assert after(rule, (0.5, 0.3), (0.5, 0.4), (0.5, 0.35)).is_over
    assert not after(rule, (0.5, 0.3), (0.5, 0.4), (0.5, 0.2), (0.5, 0.4)).is_over


def test_equal_figure_is_no_better() -> None:
    assert after(EarlyStopping(metric="auc", patience=1), (0.5, 0.3), (0.5, 0.1)).is_over


def test_without_patience_training_goes_on() -> None:
    assert not after(EarlyStopping(metric="auc", patience=0), *[(0.5, 1.0)] * 50).is_over


def test_missing_figure_is_never_better_and_does_not_count() -> None:
    rule = EarlyStopping(metric="auc", patience=2)
    without = (None, 0.1)

    assert not rule.is_better(of(*without))
    assert after(rule, without) == rule
    waiting = after(rule, (0.5, 0.3), (0.4, 0.3), without, without)
    assert (waiting.best, waiting.waits) == (0.5, 1)
