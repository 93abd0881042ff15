"""Metrics over all workers: each brings its own sums, and all get the same figure.

    auc = fleet.metrics.auc(executor.infer_from_dataset(dataset))

Every worker calls them, in the same order, as they wait for each other: never under `is_first_worker()`.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from ctr_ps.ctr_model.metrics import ClickMetrics, auc_of_histograms
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Numbers
from ctr_ps.ps_worker.fleet.util import all_reduce


def sum(values: ArrayLike) -> Numbers:
    """Returns the sums over workers, float64 of the shape of `values`."""
    return all_reduce(values, "sum")


def max(values: ArrayLike) -> Numbers:
    """Returns the largest over workers, float64 of the shape of `values`."""
    return all_reduce(values, "max")


def min(values: ArrayLike) -> Numbers:
    """Returns the smallest over workers, float64 of the shape of `values`."""
    return all_reduce(values, "min")


def merged(metrics: ClickMetrics) -> ClickMetrics:
    """Returns the metrics of the examples of all workers: every figure with two exchanges."""
    bounds = max(metrics.bounds())
    return ClickMetrics.from_vector(sum(metrics.to_vector(bounds)), bounds)


def auc(stat_pos: ClickMetrics | ArrayLike, stat_neg: ArrayLike | None = None) -> float:
    """Returns the area under the ROC curve; nan where all workers together have one class only.

    Takes what an evaluation returned; or two histograms [buckets] by ascending prediction, of clicks and of
    examples that were not clicked. Raises UsageError unless these have the same length.
    """
    if isinstance(stat_pos, ClickMetrics):
        return merged(stat_pos).auc()
    clicks = np.asarray(stat_pos, np.float64).reshape(-1)
    others = np.asarray(() if stat_neg is None else stat_neg, np.float64).reshape(-1)
    if clicks.shape != others.shape:
        raise UsageError(
            f"auc() got {clicks.size} buckets of clicks and {others.size} of other examples: give the same "
            "number of both, or the result of infer_from_dataset()"
        )
    clicks, others = sum(np.stack([clicks, others]))
    return auc_of_histograms(clicks, others)


def acc(correct: ArrayLike, total: ArrayLike) -> float:
    """Returns the share of `total` examples that were predicted right; nan without examples."""
    return _ratio(correct, total)


def mae(abserr: ArrayLike, total: ArrayLike) -> float:
    """Returns the mean of absolute errors whose sum is `abserr`; nan without examples."""
    return _ratio(abserr, total)


def mse(sqrerr: ArrayLike, total: ArrayLike) -> float:
    """Returns the mean of squared errors whose sum is `sqrerr`; nan without examples."""
    return _ratio(sqrerr, total)


def rmse(sqrerr: ArrayLike, total: ArrayLike) -> float:
    """Returns the root of the mean of squared errors whose sum is `sqrerr`; nan without examples."""
    return math.sqrt(_ratio(sqrerr, total))


def _ratio(part: ArrayLike, total: ArrayLike) -> float:
    """Returns the sum of `part` over workers and elements, over that of `total`."""
    parts, totals = sum([np.sum(part), np.sum(total)])
    return float(parts / totals) if totals else math.nan
