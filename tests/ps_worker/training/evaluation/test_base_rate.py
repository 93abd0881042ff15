"""The click rate of the first rows."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ps_worker.training.evaluation.base_rate import HEAD_ROWS, rates_of


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
