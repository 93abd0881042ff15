"""Metrics and status page of a worker, on a port of its own: what its `Progress` counts anyhow.

    Progress, retries of the store --> WorkerMetrics.collect --> /metrics
                                   `-> worker_status         --> /

Loss, AUC and calibration are of predictions made before the examples were trained on.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ctr_ps.protos.metrics.metrics_port import Series, Status, Table, open_metrics_port
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.data.streams.stream_data import LATE_S
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.training.meter import Progress

NUM_PARTITIONS = 10
"""Of a stream, on the page."""


class WorkerMetrics(Collector):
    """Collects the metrics of one worker's training. For any thread."""

    def __init__(self, progress: Progress, num_retries: Callable[[], int]) -> None:
        """Reads nothing yet; `num_retries` returns how many calls the worker has sent again."""
        self._progress = progress
        self._num_retries = num_retries

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as of now."""
        counts = self._progress.counts()
        yield _counter(
            "steps", "Batches trained on, including those of an earlier run.", self._progress.steps
        )
        yield _counter("examples", "Examples trained on.", counts.examples)
        yield _counter("loss", "Weighted sum of the loss over examples.", counts.loss)
        yield _counter("weight", "Sum of the weights of examples.", counts.weight)
        seconds = CounterMetricFamily(
            "ctr_worker_step_seconds",
            "Time of training threads by part of a step.",
            labels=["part"],
        )
        for part, value in self._progress.times.totals().items():
            seconds.add_metric([part], value)
        yield seconds
        recent = self._progress.recent()
        for name, text, value in (
            ("recent_log_loss", "Log loss of the last batches.", recent.log_loss()),
            ("recent_auc", "AUC of the last batches.", recent.auc()),
            (
                "recent_calibration",
                "Calibration of the last batches: predicted over actual clicks.",
                recent.calibration(),
            ),
        ):
            if math.isfinite(value):
                yield GaugeMetricFamily(f"ctr_worker_{name}", text, value=value)
        yield _counter("retries", "Calls retried.", self._num_retries())
        if (held := self._progress.held) is not None:
            yield GaugeMetricFamily("ctr_worker_publish_held", "Passes held in a row.", value=held)
        lag = GaugeMetricFamily(
            "ctr_worker_stream_lag_messages",
            "Messages of a stream that were not read, a few seconds ago.",
            labels=["partition"],
        )
        for partition, messages in self._progress.lag().items():
            lag.add_metric([partition], messages)
        yield lag
        late = HistogramMetricFamily(
            "ctr_worker_stream_late_seconds",
            "How far late messages of a stream were behind the newest one before them.",
            labels=["outcome"],
        )
        for outcome, (*numbers, total_s) in self._progress.lateness.items():
            buckets = zip([*map(str, LATE_S), "+Inf"], accumulate(numbers), strict=True)
            late.add_metric([outcome], list(buckets), total_s)
        yield late


def metrics_port(run: Run, address: str) -> AbstractContextManager[Any]:
    """Opens the port for metrics of a worker, [HOST:]PORT, for the time of the block; empty: no port.

    Raises:
        UsageError: If the address is none, or is not loopback and nothing protects it.
        BindError: If it cannot be bound.
    """
    if not address:
        return nullcontext()
    return open_metrics_port(
        address,
        WorkerMetrics(run.progress, _retries_of(run)),
        lambda: worker_status(run),
        Credentials.from_environment(),
    )


def worker_status(run: Run) -> Status:
    """Returns the status of a worker as of now."""
    progress, counts, recent = run.progress, run.progress.counts(), run.progress.recent()
    seconds = progress.times.totals()
    total_s = sum(seconds.values()) or math.nan
    lag = progress.lag()
    unread = {"messages not read": sum(lag.values())} if lag else {}
    return Status(
        title=f"ctr-ps worker {run.worker} of {run.num_workers}",
        figures={
            "steps": progress.steps,
            "examples": counts.examples,
            "mean loss": progress.mean_loss,
            "log loss, last batches": recent.log_loss(),
            "AUC, last batches": recent.auc(),
            "calibration, last batches": recent.calibration(),
            "calls retried": _retries_of(run)(),
            **unread,
        },
        series=[
            Series(name="examples a second", value=counts.examples, kind="rate"),
            Series(name="log loss, last batches", value=recent.log_loss(), kind="value"),
            Series(name="AUC, last batches", value=recent.auc(), kind="value"),
            *(Series(name=name, value=value, kind="value") for name, value in unread.items()),
        ],
        tables=[
            Table(
                title="Time of steps",
                columns=("part", "seconds of threads", "share"),
                rows=[(part, value, value / total_s) for part, value in seconds.items()],
            ),
            *([_unread_table(lag)] if lag else []),
        ],
    )


def _unread_table(lag: Mapping[str, int]) -> Table:
    return Table(
        title="Messages not read, of the partitions with the most",
        columns=("partition", "messages"),
        rows=sorted(lag.items(), key=lambda each: -each[1])[:NUM_PARTITIONS],
    )


def _retries_of(run: Run) -> Callable[[], int]:
    store = run.store
    return (lambda: store.num_retries) if isinstance(store, ClusterClient) else lambda: 0


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"ctr_worker_{name}", text, value=value)
