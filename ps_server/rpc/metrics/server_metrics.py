"""Metrics of a server for Prometheus, read at each scrape from what the server counts anyhow.

    service --CallCounts--.
    engine  --status()-----+--> ServerMetrics.collect --> /metrics
    update log, backlog ---'

Names of calls are those of OpenTelemetry's semantic conventions for RPC where these have one
(https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/), as Prometheus writes them. No metric has a
label for a key or a worker, of which a job may have thousands: the status page shows each worker.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ctr_ps.protos.store import Staleness, StoreStatus, TableStatus, WorkerState
from ctr_ps.protos.wire.calls import SERVICE
from ctr_ps.ps_server.durability.update_log import UpdateLog
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.rpc.backlog import Backlog
from ctr_ps.ps_server.rpc.metrics.call_metrics import BOUNDS_S, CallCounts, Histogram
from ctr_ps.ps_server.rpc.recovery import Replayed

TABLE_GAUGES = {
    "rows": ("Rows.", "rows"),
    "size_bytes": ("Memory of rows, index and marks of changed rows.", "size_bytes"),
    "load_ratio": ("Used share of the index.", "load_factor"),
    "imbalance_ratio": ("(max - min) / mean of the rows of this server's shards.", "imbalance"),
    "candidates": ("Keys that are counted but have no row yet.", "candidates"),
    "candidate_bytes": ("Memory of the counts of candidates.", "candidate_bytes"),
}
TABLE_COUNTERS = {
    "rows_created": ("Rows admitted or loaded.", "created"),
    "rows_evicted": ("Rows removed from a full table to make room.", "evicted"),
    "rows_expired": ("Rows removed by shrinks.", "expired"),
}
"""By name of the metric: its text, and the attribute of `TableStatus`."""

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Always the same, however little was seen: rates of buckets need them."""


class ServerMetrics(Collector):
    """Collects the metrics of one server. For any thread."""

    def __init__(
        self,
        engine: Engine,
        calls: Mapping[str, CallCounts],
        backlog: Backlog,
        log: Callable[[], UpdateLog | None],
        replayed: Callable[[], Replayed | None] = lambda: None,
    ) -> None:
        """Reads nothing yet; `calls` are counts by name of the RPC."""
        self._engine = engine
        self._calls = calls
        self._backlog = backlog
        self._log = log
        self._replayed = replayed

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as of now."""
        status = self._engine.status()
        yield from _of_job(status, self._engine.members.total)
        yield from _of_tables(status.tables)
        yield from _of_saves(status)
        yield from self._of_calls()
        log, backlog = self._log(), self._backlog
        yield _gauge("backlog_calls", "Calls in a thread or waiting for one.", backlog.num_calls)
        yield _gauge("backlog_bytes", "Bytes of the requests in the backlog.", backlog.num_bytes)
        yield _counter("overload_refusals", "Calls refused by a full backlog.", backlog.num_refused)
        if log is not None:
            yield from _of_log(log)
        if (replayed := self._replayed()) is not None:
            yield _gauge("recovery_calls", "Calls replayed by the recovery.", replayed.calls)
            seconds = replayed.load_s + replayed.replay_s
            yield _gauge("recovery_seconds", "Duration of the recovery.", seconds)

    def _of_calls(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "rpc_server_call_duration_seconds",
            "Time from request to answer, with waits for other workers.",
            labels=["rpc_system_name", "rpc_method", "rpc_response_status_code"],
        )
        waits = HistogramMetricFamily(
            "ctr_ps_call_wait_seconds",
            "Time that calls waited for other workers or the update log.",
            labels=["rpc_method"],
        )
        received = CounterMetricFamily(
            "ctr_ps_received_bytes", "Bytes of requests.", labels=["rpc_method"]
        )
        sent = CounterMetricFamily("ctr_ps_sent_bytes", "Bytes of answers.", labels=["rpc_method"])
        keys = CounterMetricFamily(
            "ctr_ps_keys", "Keys pulled or pushed.", labels=["rpc_method", "table"]
        )
        for name, counts in self._calls.items():
            if not counts.durations:
                continue  # else thirty calls of which most never come
            method = f"{SERVICE}/{name}"
            # Lists are made at once: the event loop adds to the dictionaries meanwhile.
            for status, histogram in list(counts.durations.items()):
                _add(durations, ["grpc", method, status], histogram)
            _add(waits, [method], counts.waits)
            received.add_metric([method], counts.received_bytes)
            sent.add_metric([method], counts.sent_bytes)
            for table, num_keys in list(counts.keys.items()):
                keys.add_metric([method, table], num_keys)
        yield from (durations, waits, received, sent, keys)


def _of_job(status: StoreStatus, num_members: int) -> Iterator[Metric]:
    yield _gauge("version", "Version of the parameters.", status.version)
    yield _counter("batches", "Applied batches of all workers.", status.batches)
    yield _counter("examples", "Examples pushed.", status.num_examples)
    yield _staleness(status.staleness)
    yield _counter(
        "duplicate_pushes",
        "Pushes received again after a lost answer, and not applied again.",
        status.duplicates,
    )
    workers = GaugeMetricFamily(
        "ctr_ps_workers", "Workers and heter trainers, by state.", labels=["state"]
    )
    states = Counter(map(status.state_of, range(num_members)))
    for state in WorkerState:
        workers.add_metric([state.value], states[state])
    yield workers
    yield _gauge(
        "silence_max_seconds",
        "Longest time since the last call of a worker.",
        max(status.silent_s.values(), default=0.0),
    )
    if status.lease_s is not None:
        yield _gauge(
            "lease_seconds", "Time without calls after which a worker is lost.", status.lease_s
        )


def _of_tables(tables: Mapping[str, TableStatus]) -> Iterator[Metric]:
    for family, values in (
        (GaugeMetricFamily, TABLE_GAUGES),
        (CounterMetricFamily, TABLE_COUNTERS),
    ):
        for name, (text, attribute) in values.items():
            metric = family(f"ctr_ps_table_{name}", text, labels=["table"])
            for table, status in tables.items():
                metric.add_metric([table], getattr(status, attribute))
            yield metric


def _of_saves(status: StoreStatus) -> Iterator[Metric]:
    save = status.last_save
    yield _counter("saves", "Saves begun.", save.number if save else 0)
    if save is not None:
        yield _gauge("save_running", "1 while a save is being written, else 0.", not save.is_over)
        yield _gauge(
            "save_pause_seconds", "Time for which the last save paused pushes.", save.pause_s
        )
        yield _gauge("save_duration_seconds", "Duration of the last save.", save.duration_s)


def _of_log(log: UpdateLog) -> Iterator[Metric]:
    yield _gauge("update_log_size_bytes", "Size of the update log on disk.", log.size_bytes)
    yield _counter(
        "update_log_appended_bytes", "Bytes appended to the update log.", log.appended_bytes
    )
    yield _counter("update_log_records", "Records appended to the update log.", log.num_appended)
    yield _gauge(
        "update_log_replay_seconds", "Estimated time of a replay of the update log.", log.replay_s
    )
    yield _gauge(
        "update_log_waiting_records", "Records of the update log not yet on disk.", log.num_waiting
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ctr_ps_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"ctr_ps_{name}", text, value=value)


def _staleness(staleness: Staleness) -> Metric:
    family = HistogramMetricFamily(
        "ctr_ps_push_staleness",
        "Staleness of each batch: versions between its pull and its push.",
    )
    counts = staleness.at_most(STALENESS_BOUNDS)
    buckets = list(zip(map(str, STALENESS_BOUNDS), counts, strict=True))
    buckets.append(("+Inf", staleness.batches))
    family.add_metric([], buckets, sum_value=staleness.total)
    return family


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets, sum_value=histogram.total_s)
