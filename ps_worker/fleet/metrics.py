"""Metrics over all workers: each brings its own sums, and all get the same figure.

    auc = fleet.metrics.auc(executor.infer_from_dataset(dataset))

Every worker calls them, in the same order, as they wait for each other: never under `is_first_worker()`.
`all_reduce` is that of the running fleet, unless another is given.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from ctr_ps.ctr_model.metrics import ClickMetrics, auc_of_histograms
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Numbers, ReduceOp
from ctr_ps.ps_worker.fleet.running import FLEET

AllReduce = Callable[[Numbers, ReduceOp], Numbers]
"""Reduces float64[N] over workers."""


def sum(values: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> Numbers:
    """Returns the sums over workers, float64 of the shape of `values`."""
    return _reduced(values, ReduceOp.SUM, all_reduce)


def max(values: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> Numbers:
    """Returns the largest over workers, float64 of the shape of `values`."""
    return _reduced(values, ReduceOp.MAX, all_reduce)


def min(values: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> Numbers:
    """Returns the smallest over workers, float64 of the shape of `values`."""
    return _reduced(values, ReduceOp.MIN, all_reduce)


def merged(metrics: ClickMetrics, *, all_reduce: AllReduce = FLEET.all_reduce) -> ClickMetrics:
    """Returns the metrics of the examples of all workers: every figure with two exchanges."""
    bounds = all_reduce(metrics.bounds(), ReduceOp.MAX)
    return ClickMetrics.from_vector(all_reduce(metrics.to_vector(bounds), ReduceOp.SUM), bounds)


def auc(
    stat_pos: ClickMetrics | ArrayLike,
    stat_neg: ArrayLike | None = None,
    *,
    all_reduce: AllReduce = FLEET.all_reduce,
) -> float:
    """Returns the area under the ROC curve; nan where all workers together have one class only.

    Args:
        stat_pos: What an evaluation returned; or [buckets], clicks by ascending prediction.
        stat_neg: [buckets], examples that were not clicked; not with an evaluation.
        all_reduce: See above.

    Raises:
        UsageError: If there is one histogram only, or two of different lengths.
    """
    if isinstance(stat_pos, ClickMetrics):
        return merged(stat_pos, all_reduce=all_reduce).auc()
    clicks = np.asarray(stat_pos, np.float64).reshape(-1)
    others = np.asarray(() if stat_neg is None else stat_neg, np.float64).reshape(-1)
    if clicks.shape != others.shape:
        raise UsageError(
            f"auc() got {clicks.size} buckets of clicks and {others.size} of others: expected the same "
            f"number of both, or what infer_from_dataset() returns"
        )
    clicks, others = sum(np.stack([clicks, others]), all_reduce=all_reduce)
    return auc_of_histograms(clicks, others)


def acc(correct: ArrayLike, total: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> float:
    """Returns the share of `total` examples that were predicted right; nan without examples."""
    return _ratio(correct, total, all_reduce)


def mae(abserr: ArrayLike, total: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> float:
    """Returns the mean of absolute errors whose sum is `abserr`; nan without examples."""
    return _ratio(abserr, total, all_reduce)


def mse(sqrerr: ArrayLike, total: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> float:
    """Returns the mean of squared errors whose sum is `sqrerr`; nan without examples."""
    return _ratio(sqrerr, total, all_reduce)


def rmse(sqrerr: ArrayLike, total: ArrayLike, *, all_reduce: AllReduce = FLEET.all_reduce) -> float:
    """Returns the root of the mean of squared errors whose sum is `sqrerr`; nan without examples."""
    return math.sqrt(_ratio(sqrerr, total, all_reduce))


def _reduced(values: ArrayLike, op: ReduceOp, all_reduce: AllReduce) -> Numbers:
    array = np.asarray(values, np.float64)
    return all_reduce(array.reshape(-1), op).reshape(array.shape)


def _ratio(part: ArrayLike, total: ArrayLike, all_reduce: AllReduce) -> float:
    """Returns the sum of `part` over workers and elements, over that of `total`."""
    parts, totals = sum([np.sum(part), np.sum(total)], all_reduce=all_reduce)
    return float(parts / totals) if totals else math.nan
