"""The click rate of the data: where a model starts, the baseline of its loss, and advice if that is higher.

predicting the click rate p for every example:   loss = -(clicks * log p + others * log(1 - p)) / examples
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ps_worker.job import Job

HEAD_ROWS = 4096
"""Rows for the initial rate of a model: they give the log-odds of a rate of 3 % to within 0.09."""

_LEAST_RATE = 1e-12  # from weights beside which half an event is lost in rounding

_CLICK = Task("click", labels=(0,))


def rates_of(head: Iterable[Batch], tasks: Sequence[Task]) -> tuple[float, ...]:
    """Returns the (weighted) rate of each task in at least the first `HEAD_ROWS` rows.

    Half an event more in both classes keeps it between 0 and 1. Without `tasks` it is the rate of clicks;
    empty without rows, or if one lacks a label.
    """
    tasks = tasks or (_CLICK,)
    events, given, rows = np.full(len(tasks), 0.5), np.ones(len(tasks)), 0
    with closing(each for each in head) as batches:
        for batch in batches:
            if batch.all_labels is None:
                return ()
            labels = batch.all_labels.reshape(batch.size, -1) > 0.5
            if max(max(task.labels) for task in tasks) >= labels.shape[1]:
                return ()
            weights = np.ones(batch.size) if batch.weights is None else batch.weights
            for k, task in enumerate(tasks):
                counts = weights * labels[:, list(task.given)].all(axis=1)
                given[k] += counts.sum()
                events[k] += (counts * labels[:, list(task.labels)].all(axis=1)).sum()
            rows += batch.size
            if rows >= HEAD_ROWS:
                break
    rates = np.clip(events / given, _LEAST_RATE, 1.0 - _LEAST_RATE)
    return tuple(rates.tolist()) if rows else ()


def advice_on_loss(job: Job, *, is_in_process: bool = False) -> str:
    """Returns job settings to try while the loss is above that of the base rate, for a message."""
    rates = [
        _rate("optimizer.sparse", job.optimizer.sparse.spec().params),
        _rate("optimizer.dense", job.optimizer.dense.spec().params),
    ]
    strategy = job.strategy
    less_stale = {
        "async": [
            'strategy.mode = "sync" or "half_async"',
            'strategy.mode = "bounded_staleness" with max_staleness = 1',
        ],
        "half_async": ['strategy.mode = "sync"'],
        "geo": [
            'strategy.mode = "sync"',
            f"strategy.geo.k_steps below {strategy.geo.k_steps}",
        ],
        "bounded_staleness": [
            'strategy.mode = "sync"',
            f"strategy.bounded_staleness.max_staleness below {strategy.bounded_staleness.max_staleness}",
        ],
    }.get(strategy.mode, [])
    if is_in_process:
        less_stale = []
    tries = [*rates, *less_stale, f"train.batch_size above {job.train.batch_size}"]
    return (
        f"try {', '.join(tries)}; check that labels are 1 for a click, and how dense columns are scaled; if "
        "the loss still falls, train on more rows"
    )


def warning_of_test(
    job: Job,
    *,
    log_loss: float | None,
    base_log_loss: float | None,
    is_learnt: bool,
    is_in_process: bool = False,
) -> str:
    """Returns a warning about the figures of `data.test`; "" if the model beats the base rate.

    `is_learnt` says that the last training pass beat its own base rate; a loss of None is not a number.
    """
    if log_loss is None or base_log_loss is None or log_loss <= base_log_loss:
        return ""
    finding = (
        f"the log loss of data.test is {log_loss:.5f}, above {base_log_loss:.5f}, the log loss of "
        "predicting its click rate for every example"
    )
    if not is_learnt:
        return f"{finding}: {advice_on_loss(job, is_in_process=is_in_process)}"
    fewer = [f"train.epochs below {job.train.epochs}"] if job.train.epochs > 1 else []
    stop = [] if job.data.valid else ["data.valid with valid.patience = 1, which stops in time"]
    tries = [*fewer, *stop, "train.weight_decay", "train.dropout"]
    return (
        f"{finding}, although the log loss of the last pass over data.train is below it: the model probably "
        f"overfits; try {', '.join(tries)}, or check that both have rows of the same kind"
    )


def _rate(key: str, params: Mapping[str, float]) -> str:
    rate = params.get("learning_rate")
    if rate is None:
        return f"{key}.learning_rate below its default"
    return f"{key}.learning_rate below {rate:g}, or the optimizer's default"
