"""The click rate of the first rows."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.training.evaluation.base_rate import (
    HEAD_ROWS,
    advice_on_loss,
    rates_of,
    warning_of_test,
)


def batch(*labels: list[float], weights: list[float] | None = None) -> Batch:
    """A batch of one column of labels or more, and no features."""
    size = len(labels[0])
    return Batch(
        labels=np.array(labels[0], np.float32),
        other_labels=np.array(labels[1:], np.float32).T if labels[1:] else None,
        dense=np.zeros((size, 0), np.float32),
        keys=np.zeros(0, np.uint64),
        offsets=np.zeros(1, np.int32),
        num_slots=0,
        weights=None if weights is None else np.array(weights, np.float32),
    )


def test_rate_is_that_of_all_rows_with_half_an_event_more_in_each_class() -> None:
    head = [batch([1, 0, 0]), batch([0, 0, 0, 1])]

    assert rates_of(head, ()) == pytest.approx(((2 + 0.5) / (7 + 1),))


@pytest.mark.parametrize("weight", [1.0, 1e18])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_rate_is_never_0_or_1(label: float, weight: float) -> None:
    [rate] = rates_of([batch([label] * 5, weights=[weight] * 5)], ())

    assert 0 < rate < 1


def test_rows_count_as_their_weights() -> None:
    assert rates_of([batch([1, 0], weights=[2.5, 0.5])], ()) == pytest.approx((3 / 4,))


def test_each_task_has_the_rate_of_its_event_among_the_rows_that_it_is_given() -> None:
    tasks = (
        Task("click", labels=(0,)),
        Task("conversion", labels=(1,), given=(0,)),
        Task("both", labels=(0, 1)),
    )
    head = [batch([1, 1, 0, 1], [1, 0, 1, 0])]

    expected = (3.5 / 5, 1.5 / 4, 1.5 / 5)
    assert rates_of(head, tasks) == pytest.approx(expected)


def test_nothing_is_known_without_rows_or_labels() -> None:
    unlabelled = replace(batch([0]), labels=None)

    assert rates_of([], ()) == rates_of([unlabelled], ()) == ()


def test_nothing_is_known_without_all_labels() -> None:
    assert rates_of([batch([1, 0])], (Task("conversion", labels=(1,)),)) == ()


def test_no_more_is_read_than_the_first_rows_and_reading_ends() -> None:
    read, closed = [], []

    def batches() -> Iterator[Batch]:
        try:
            while True:
                read.append(len(read))
                yield batch([1.0] * (HEAD_ROWS // 2))
        finally:
            closed.append(True)

    rates_of(batches(), ())

    assert read == [0, 1]
    assert closed == [True]


def advice(*overrides: str) -> str:
    return advice_on_loss(override_job({}, overrides, source="test"))


def test_own_learning_rate_is_named_with_its_value() -> None:
    text = advice("optimizer.sparse.learning_rate=0.5")

    assert "optimizer.sparse.learning_rate below 0.5, or the optimizer's default" in text
    assert "a optimizer" not in text
    assert "optimizer.dense.learning_rate below its default" in text


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("async", 'strategy.mode = "sync" or "half_async"'),
        ("async", "max_staleness = 1"),
        ("half_async", 'strategy.mode = "sync"'),
        ("geo", "strategy.geo.k_steps below 100"),
        ("bounded_staleness", "strategy.bounded_staleness.max_staleness below 8"),
    ],
)
def test_mode_is_told_how_to_be_less_stale(mode: str, key: str) -> None:
    assert key in advice(f"strategy.mode={mode}")


def test_synchronous_training_is_not_told_to_be_synchronous() -> None:
    assert "strategy" not in advice("strategy.mode=sync")
    assert "train.batch_size above 128" in advice("strategy.mode=sync")


@pytest.mark.parametrize("mode", ["half_async", "async", "geo", "bounded_staleness"])
def test_no_mode_is_stale_in_one_process(mode: str) -> None:
    job = override_job({}, [f"strategy.mode={mode}"], source="test")
    assert "strategy" in advice_on_loss(job)
    assert "strategy" not in advice_on_loss(job, is_in_process=True)


def test_test_loss_above_the_base_rate_is_overfitting_only_if_training_went_well() -> None:
    job = override_job({}, ["train.epochs=3"], source="test")

    overfit = warning_of_test(job, log_loss=0.2, base_log_loss=0.1, is_learnt=True)
    unlearnt = warning_of_test(job, log_loss=0.2, base_log_loss=0.1, is_learnt=False)
    once = override_job({}, ["train.epochs=1"], source="test")
    in_one_pass = warning_of_test(once, log_loss=0.2, base_log_loss=0.1, is_learnt=True)

    assert "probably overfits" in overfit
    assert "train.epochs below 3" in overfit
    assert "train.epochs" not in in_one_pass
    assert "valid.patience" in overfit
    assert "probably overfits" not in unlearnt
    assert unlearnt.endswith(advice_on_loss(job))


def test_test_loss_above_the_base_rate_is_not_laid_to_stale_gradients_in_process() -> None:
    job = override_job({}, ["strategy.mode=async"], source="test")

    warning = warning_of_test(
        job, log_loss=0.2, base_log_loss=0.1, is_learnt=False, is_in_process=True
    )

    assert warning.endswith(advice_on_loss(job, is_in_process=True))
    assert "strategy" not in warning


@pytest.mark.parametrize("losses", [(0.1, 0.2), (0.2, 0.2), (None, 0.2), (0.2, None)])
def test_test_loss_that_is_no_worse_or_no_number_needs_no_words(
    losses: tuple[float | None, float | None],
) -> None:
    job = override_job({}, [], source="test")
    assert not warning_of_test(job, log_loss=losses[0], base_log_loss=losses[1], is_learnt=True)
