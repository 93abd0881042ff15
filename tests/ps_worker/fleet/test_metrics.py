"""Metrics over workers, here this one and another that brings fixed numbers."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Numbers, ReduceOp
from ctr_ps.ps_worker.fleet import metrics
from ctr_ps.ps_worker.fleet.running import FLEET

REDUCE = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Adds one more worker, which brings numbers."""

    def add(*others: float) -> None:
        def all_reduce(values: Numbers, op: ReduceOp) -> Numbers:
            assert values.dtype == np.float64
            assert values.ndim == 1
            return REDUCE[op](values, np.array(others, np.float64))

        monkeypatch.setattr(FLEET, "all_reduce", all_reduce)

    return add


def measured(seed: int, examples: int = 200) -> ClickMetrics:
    rng = np.random.default_rng(seed)
    found = ClickMetrics()
    labels = (rng.random(examples) < 0.3).astype(np.float32)
    found.add(labels, np.clip(rng.normal(0.3 + 0.2 * labels, 0.2), 0, 1).astype(np.float32))
    return found


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (metrics.sum, [[11, 2], [5, 4]]),
        (metrics.max, [[10, 2], [3, 4]]),
        (metrics.min, [[1, 0], [2, 0]]),
    ],
)
def test_arrays_are_reduced_in_their_shape(function, expected, with_another) -> None:
    with_another(10, 0, 2, 0)

    assert function(np.float32([[1, 2], [3, 4]])).tolist() == expected


def test_a_number_is_reduced_to_a_number(with_another) -> None:
    with_another(4)

    assert metrics.sum(3) == 7.0


def test_auc_of_evaluations_is_that_of_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = measured(1), measured(2)

    def all_reduce(values: Numbers, op: ReduceOp) -> Numbers:
        if op is ReduceOp.MAX:
            return np.maximum(values, theirs.bounds())
        return values + theirs.to_vector(np.maximum(mine.bounds(), theirs.bounds()))

    monkeypatch.setattr(FLEET, "all_reduce", all_reduce)
    auc, merged = metrics.auc(mine), metrics.merged(mine)

    together = measured(1)
    together.merge(theirs)
    assert auc == merged.auc() == together.auc()
    assert merged.examples == 400


def test_auc_of_histograms_is_that_of_all_examples(with_another) -> None:
    with_another(*[0, 1], *[1, 0])

    assert metrics.auc([0, 1], [1, 0]) == 1.0
    assert metrics.auc([[1, 0]], [[0, 1]]) == 0.5


@pytest.mark.parametrize("histograms", [([1, 2],), ([1, 2], [1])])
def test_auc_of_histograms_that_do_not_fit_is_refused(histograms) -> None:
    with pytest.raises(UsageError, match=r"auc\(\) got 2 buckets"):
        metrics.auc(*histograms)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(metrics.acc, 0.25), (metrics.mae, 0.25), (metrics.mse, 0.25), (metrics.rmse, 0.5)],
)
def test_ratios_are_of_sums_over_workers(function, expected: float, with_another) -> None:
    with_another(2, 8)

    assert function(1, 4) == expected
    assert function([0.5, 0.5], [[1], [3]]) == expected


@pytest.mark.parametrize("function", [metrics.acc, metrics.mae, metrics.mse, metrics.rmse])
def test_ratios_without_examples_are_nan(function, with_another) -> None:
    with_another(0, 0)

    assert math.isnan(function(0, 0))
