"""What a worker tells Prometheus, compared with what it was told to count."""

import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.job.model import model_of
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.worker_metrics import WorkerMetrics, metrics_port, worker_status
from ctr_ps.ps_worker.training.meter import Progress
from tests.support.cluster import cluster
from tests.support.training import job_of, worker_run

ROOT = Path(__file__).parents[3]


def run_on(store: Store) -> Run:
    job = job_of("model.name=lr")
    return worker_run(store, model_of(job, Schema.load("criteo")), job)


def scraped(progress: Progress, retries: int = 0) -> Callable[..., float | None]:
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(progress, lambda: retries))
    return lambda name, **labels: registry.get_sample_value(f"ctr_worker_{name}", labels)


def test_worker_that_has_not_begun_has_no_recent_figures() -> None:
    value = scraped(Progress(every_s=60))

    assert value("steps_total") == value("examples_total") == 0
    assert value("recent_auc") is None
    assert value("recent_log_loss") is None


def test_figures_are_those_of_the_progress() -> None:
    progress = Progress(every_s=60)
    labels = np.array([1, 0, 0, 1], np.float32)
    predictions = np.array([0.75, 0.25, 0.75, 0.25], np.float32)

    progress.add(labels, predictions, loss_sum=3.0, weights=np.full(4, 0.5, np.float32))
    progress.times.add("pull", 0.5)
    progress.times.take()  # for a pass: totals go on
    progress.times.add("pull", 0.25)
    value = scraped(progress, retries=3)

    assert value("steps_total") == 1
    assert (value("examples_total"), value("weight_total")) == (4, 2.0)
    assert value("loss_total") == 3.0
    assert value("step_seconds_total", part="pull") == 0.75
    assert value("recent_auc") == pytest.approx(0.5)
    assert value("recent_calibration") == pytest.approx(1.0)
    assert value("retries_total") == 3
    assert value("publish_held") is None, "there is no gate"
    progress.held = 2
    assert value("publish_held") == 2
    assert value("stream_lag_messages", partition="clicks/0") is None
    progress.lag = lambda: {"clicks/0": 7, "clicks/1": 0}
    assert value("stream_lag_messages", partition="clicks/0") == 7
    assert value("stream_lag_messages", partition="clicks/1") == 0
    progress.lateness = {"trained": [2, 1, 0, 0, 0, 0, 0, 4, 9.5]}
    late = partial(value, outcome="trained")
    assert [late("stream_late_seconds_bucket", le=le) for le in ("1.0", "10.0", "86400.0")] == [
        2,
        3,
        3,
    ]
    assert (late("stream_late_seconds_count"), late("stream_late_seconds_sum")) == (7, 9.5)


def test_page_on_monitoring_has_each_metric_and_no_other() -> None:
    progress = Progress(every_s=60)
    progress.add(np.array([1, 0], np.float32), np.array([0.5, 0.5], np.float32), loss_sum=1.0)
    progress.held = 0
    progress.lag = lambda: {"clicks/0": 7}
    progress.lateness = {"trained": [0.0] * 9}
    names = {
        re.sub("_(bucket|count|sum)$", "", sample.name)
        for family in WorkerMetrics(progress, lambda: 0).collect()
        for sample in family.samples
    }

    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")

    assert set(re.findall("ctr_worker_[a-z_]+", page)) == names


def test_page_shows_each_figure_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterClient, "num_retries", 3)
    with cluster() as servers, run_on(servers.client(joins=False)) as run:
        labels, predictions = np.array([1, 0], np.float32), np.array([0.75, 0.25], np.float32)
        run.progress.add(labels, predictions, loss_sum=3.0)
        for part, seconds in (("pull", 0.5), ("compute", 1.5)):
            run.progress.times.add(part, seconds)

        status = worker_status(run)

        run.leave()
    recent = run.progress.recent()
    assert status.figures == {
        "steps": 1,
        "examples": 2,
        "mean loss": 1.5,
        "log loss, last batches": recent.log_loss(),
        "AUC, last batches": 1.0,
        "calibration, last batches": 1.0,
        "calls retried": 3,
    }
    assert recent.log_loss() == pytest.approx(-math.log(0.75))
    assert {each.name: each.value for each in status.series} == {
        "examples a second": 2,
        "log loss, last batches": recent.log_loss(),
        "AUC, last batches": 1.0,
    }
    (times,) = status.tables
    assert {part: share for part, _, share in times.rows}["compute"] == 0.75


def test_page_shows_what_is_not_read_of_a_stream() -> None:
    with run_on(ParameterStore()) as run:
        run.progress.lag = lambda: {f"clicks/{k}": k for k in range(20)}
        status = worker_status(run)
        run.leave()

    assert status.figures["messages not read"] == 190
    assert {each.name: each.value for each in status.series}["messages not read"] == 190
    assert [*status.tables[1].rows] == [(f"clicks/{k}", k) for k in range(19, 9, -1)]


def test_port_is_open_for_the_time_of_a_run() -> None:
    with run_on(ParameterStore()) as run:
        with metrics_port(run, "127.0.0.1:0") as port:
            text = urllib.request.urlopen(f"{port.url}/metrics", timeout=10).read().decode()
            status = urllib.request.urlopen(f"{port.url}/status.json", timeout=10).read().decode()
        assert "ctr_worker_steps_total 0.0" in text
        assert '"title": "ctr-ps worker 0 of 1"' in status
        assert "process_resident_memory_bytes" in text
        with metrics_port(run, "") as none:
            assert none is None
        with pytest.raises(UsageError, match=r"expected \[HOST:\]PORT"):
            metrics_port(run, "somewhere")
        run.leave()


def test_port_of_a_worker_asks_for_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTR_PS_TOKEN", "a-token-of-this-test")
    with run_on(ParameterStore()) as run:
        with (
            metrics_port(run, "127.0.0.1:0") as port,
            pytest.raises(urllib.error.HTTPError) as refused,
        ):
            urllib.request.urlopen(f"{port.url}/metrics", timeout=10)
        refused.value.close()
        run.leave()

    assert refused.value.code == 401
