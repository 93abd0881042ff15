"""Advice for a model with a higher loss than that of the click rate."""

from collections.abc import Mapping

from ctr_ps.ps_worker.job import Job


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
        f"try {', '.join(tries)}; check that labels are 1 for a click, and how the numbers of dense columns "
        f"are scaled; while the loss still falls, train on more rows"
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
        f"the log loss of data.test is {log_loss:.5f}, above {base_log_loss:.5f}, "
        f"that of predicting its click rate for every example"
    )
    if not is_learnt:
        return f"{finding}: {advice_on_loss(job, is_in_process=is_in_process)}"
    fewer = [f"train.epochs below {job.train.epochs}"] if job.train.epochs > 1 else []
    stop = [] if job.data.valid else ["data.valid with valid.patience = 1, which stops in time"]
    tries = [*fewer, *stop, "train.weight_decay", "train.dropout"]
    return (
        f"{finding}, though that of the last pass over data.train is below: the model has probably learnt "
        f"its training rows by heart; try {', '.join(tries)}, or check that both are of the same kind of rows"
    )


def _rate(key: str, params: Mapping[str, float]) -> str:
    rate = params.get("learning_rate")
    if rate is None:
        return f"{key}.learning_rate below its default"
    return f"{key}.learning_rate below {rate:g}, or the optimizer's default"
