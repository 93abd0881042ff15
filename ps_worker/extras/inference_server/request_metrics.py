"""Metrics of `ps-serve`, for Prometheus, and what its status page shows."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ctr_ps.protos.metrics.metrics_port import Series, Status
from ctr_ps.ps_worker.extras.inference_server.served_model import ServedModel

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class RequestMetrics(Collector):
    """Counts requests, and collects what there is to know of a served model. Thread-safe."""

    def __init__(self, model: ServedModel) -> None:
        """Has seen no request."""
        self._model = model
        self._durations = Histogram(
            "ctr_serve_request_duration_seconds",
            "From the arrival of a request to its answer.",
            ["protocol", "method", "status"],
            buckets=BOUNDS_S,
            registry=None,
        )
        self._num_requests = 0

    def ended(self, protocol: str, method: str, status: str, seconds: float) -> None:
        """A request ended with a status of its protocol."""
        self._num_requests += 1
        self._durations.labels(protocol, method, status).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics as of now."""
        yield from self._durations.collect()
        model, counts = self._model, self._model.counts
        yield CounterMetricFamily("ctr_serve_rows", "Rows predicted.", value=counts.rows)
        yield GaugeMetricFamily(
            "ctr_serve_waiting_requests",
            "Requests that have a thread, or wait for one.",
            value=model.num_waiting,
        )
        reloads = CounterMetricFamily(
            "ctr_serve_reloads", "Newer models that were found.", labels=["result"]
        )
        reloads.add_metric(["served"], counts.reloads)
        reloads.add_metric(["failed"], counts.failed_reloads)
        yield reloads
        served = GaugeMetricFamily(
            "ctr_serve_model_info", "1, of the model that answers.", labels=["model", "version"]
        )
        served.add_metric([model.name, model.current.version], 1)
        yield served
        yield GaugeMetricFamily(
            "ctr_serve_model_age_seconds",
            "Since the model that answers was loaded.",
            value=time.time() - model.current.since,
        )

    def describe(self) -> Iterable[Metric]:
        """Says nothing, so that registering collects nothing."""
        return ()

    def status(self) -> Status:
        """Returns what the status page shows."""
        model, counts = self._model, self._model.counts
        return Status(
            title=f"ps-serve {model.name}",
            figures={
                "version": model.current.version,
                "seconds since it was loaded": round(time.time() - model.current.since),
                "rows": counts.rows,
                "reloads": counts.reloads,
                "reloads that failed": counts.failed_reloads,
                "requests that wait": model.num_waiting,
            },
            series=[
                Series(name="requests a second", value=self._num_requests, kind="rate"),
                Series(name="rows a second", value=counts.rows, kind="rate"),
            ],
        )
