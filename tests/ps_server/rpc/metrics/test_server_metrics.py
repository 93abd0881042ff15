"""What a server tells Prometheus, compared with what was done to it."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.metrics.metrics_port import Status
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Lease, Missing, SaveRequest, TableStatus, WorkerLoss
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.rpc.backlog import Backlog
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.metrics.call_metrics import BOUNDS_S, CallCounts, Histogram
from ctr_ps.ps_server.rpc.metrics.server_metrics import (
    STALENESS_BOUNDS,
    TABLE_COUNTERS,
    TABLE_GAUGES,
    ServerMetrics,
)
from ctr_ps.ps_server.rpc.metrics.server_status import server_status
from ctr_ps.ps_server.rpc.recovery import Replayed
from ctr_ps.ps_server.rpc.service import Service
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import INCARNATION, joined, push_id

ROOT = Path(__file__).parents[4]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
METHOD = "ctr_ps.v1.ParameterServer/{}"


class Server:
    """A store, its service without a network, and its metrics."""

    def __init__(
        self,
        num_workers: int = 1,
        log: Callable[[], Any] = lambda: None,
        replayed: Replayed | None = None,
    ) -> None:
        self.store = joined(ParameterStore(num_workers=num_workers))
        self.store.create_table(
            TableSpec(
                name="t",
                dim=2,
                num_shards=4,
                initializer=InitializerSpec(),
                optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
            )
        )
        self.backlog = Backlog(max_calls=1)
        self.service = Service(Handlers(self.store.engine), backlog=self.backlog)
        self.metrics = ServerMetrics(
            self.store.engine, self.service.counts, self.backlog, log, lambda: replayed
        )

    async def call(self, call: calls.Call, argument: object) -> None:
        message = call.request.encode(argument)
        await self.service.method(call)(message, _Context())

    async def push(
        self,
        num_keys: int,
        worker: int = 0,
        at: int | None = None,
        sequence: int | None = None,
        examples: int = 1,
    ) -> None:
        keys = np.arange(num_keys, dtype=np.uint64)
        grad = SparseGrad(keys, np.ones((num_keys, 2), np.float32), 1)
        request = requests.PushGrad(
            chunk=PushChunk([("t", grad)], []),
            push_id=push_id(worker, sequence, examples),
            at=at,
            shard_map_epoch=FIRST_EPOCH,
        )
        await self.call(calls.PUSH_GRAD, request)

    async def pull(self, num_keys: int, at: int | None = None) -> None:
        keys = np.arange(num_keys, dtype=np.uint64)
        request = requests.PullSparse(
            keys={"t": keys}, missing=Missing.ZEROS, at=at, shard_map_epoch=FIRST_EPOCH
        )
        await self.call(calls.PULL_SPARSE, request)

    def status(self) -> Status:
        return server_status(self.store.engine, self.service.counts)

    def scrape(self) -> Samples:
        registry = CollectorRegistry()
        registry.register(self.metrics)
        text = generate_latest(registry).decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class _Context:
    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        raise RuntimeError(code.name)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def duration_count(samples: Samples, call: str, status: str) -> float:
    return value(
        samples,
        "rpc_server_call_duration_seconds_count",
        rpc_system_name="grpc",
        rpc_method=METHOD.format(call),
        rpc_response_status_code=status,
    )


async def test_calls_are_counted_with_their_status_bytes_and_keys() -> None:
    server = Server()

    await server.push(10)
    await server.pull(3)
    await server.pull(4)
    with pytest.raises(RuntimeError, match="FAILED_PRECONDITION"):
        await server.push(5, worker=7)
    samples = server.scrape()

    assert duration_count(samples, "PullSparse", "OK") == 2
    assert duration_count(samples, "PushGrad", "OK") == 1
    assert duration_count(samples, "PushGrad", "FAILED_PRECONDITION") == 1
    pull = METHOD.format("PullSparse")
    assert value(samples, "ctr_ps_keys_total", rpc_method=pull, table="t") == 7
    assert value(samples, "ctr_ps_received_bytes_total", rpc_method=pull) > 7 * 8
    assert value(samples, "ctr_ps_sent_bytes_total", rpc_method=pull) >= 7 * 2 * 4
    assert value(samples, "ctr_ps_call_wait_seconds_count", rpc_method=pull) == 0
    assert not any(METHOD.format("Save") in str(labels) for _, labels in samples)


def test_keys_are_counted_by_table_whether_pulled_or_pushed() -> None:
    counts = CallCounts()
    keys = np.arange(9, dtype=np.uint64)
    grad = SparseGrad(keys[:4], np.ones((4, 2), np.float32), 1)

    counts.touched(
        requests.PullSparse(
            keys={"t": keys[:3], "u": keys},
            missing=Missing.ZEROS,
            at=None,
            shard_map_epoch=FIRST_EPOCH,
        )
    )
    counts.touched(
        requests.PushGrad(
            chunk=PushChunk([("u", grad)], []),
            push_id=push_id(),
            at=None,
            shard_map_epoch=FIRST_EPOCH,
        )
    )

    assert counts.keys == {"t": 3, "u": 13}


async def test_waiting_for_other_workers_is_told_apart() -> None:
    server = Server(num_workers=2)

    waiting = asyncio.create_task(server.pull(3, at=1))
    await asyncio.sleep(0)  # it has begun
    await server.push(3, worker=0, at=0)
    assert not waiting.done()
    await server.push(3, worker=1, at=0)
    await waiting
    samples, pull = server.scrape(), METHOD.format("PullSparse")

    assert value(samples, "ctr_ps_call_wait_seconds_count", rpc_method=pull) == 1
    waited = value(samples, "ctr_ps_call_wait_seconds_sum", rpc_method=pull)
    lasted = value(
        samples,
        "rpc_server_call_duration_seconds_sum",
        rpc_system_name="grpc",
        rpc_method=pull,
        rpc_response_status_code="OK",
    )
    assert 0 < waited < lasted


async def test_call_whose_client_is_gone_is_counted_as_cancelled() -> None:
    server = Server(num_workers=2)

    waiting = asyncio.create_task(server.pull(3, at=1))
    await asyncio.sleep(0)  # it has begun
    await server.push(3, worker=0, at=0)
    waiting.cancel()
    await asyncio.wait([waiting])

    assert duration_count(server.scrape(), "PullSparse", "CANCELLED") == 1


async def test_tables_and_progress_are_those_of_the_status() -> None:
    server = Server()
    await server.push(100)
    samples, status = server.scrape(), server.store.status()
    table = status.tables["t"]

    assert value(samples, "ctr_ps_version") == status.version == 1
    assert value(samples, "ctr_ps_batches_total") == status.batches == 1
    assert value(samples, "ctr_ps_examples_total") == 1
    assert value(samples, "ctr_ps_table_rows", table="t") == 100
    assert value(samples, "ctr_ps_table_rows_created_total", table="t") == 100
    assert value(samples, "ctr_ps_table_size_bytes", table="t") == table.size_bytes
    assert value(samples, "ctr_ps_table_load_ratio", table="t") == 100 / table.index_slots
    imbalance = (table.largest_shard - table.smallest_shard) / 25
    assert value(samples, "ctr_ps_table_imbalance_ratio", table="t") == pytest.approx(imbalance)


def test_figures_of_a_table_are_each_of_their_own() -> None:
    table = TableStatus(
        rows=8,
        size_bytes=100,
        candidates=3,
        candidate_bytes=70,
        expired=20,
        evicted=400,
        shards=4,
        smallest_shard=1,
        largest_shard=4,
        index_slots=16,
    )

    found = {
        name: getattr(table, attribute)
        for name, (_, attribute) in {**TABLE_GAUGES, **TABLE_COUNTERS}.items()
    }

    assert found == {
        "rows": 8,
        "size_bytes": 100,
        "load_ratio": 0.5,
        "imbalance_ratio": 1.5,
        "candidates": 3,
        "candidate_bytes": 70,
        "rows_created": 428,
        "rows_evicted": 400,
        "rows_expired": 20,
    }


def test_workers_are_counted_by_state() -> None:
    server = Server(num_workers=3)
    server.store.leave(1, step=0)

    def states() -> dict[str, float]:
        samples = server.scrape()
        names = ("present", "left", "lost", "missing")
        return {name: value(samples, "ctr_ps_workers", state=name) for name in names}

    assert states() == {"present": 2, "left": 1, "lost": 0, "missing": 0}
    server.store.engine.pass_time(5.0)
    assert value(server.scrape(), "ctr_ps_silence_max_seconds") == 5.0


async def test_silence_is_that_of_the_worker_that_is_silent_for_longest() -> None:
    server = Server(num_workers=2)
    server.store.engine.pass_time(5.0)
    await server.push(3, worker=1)

    assert value(server.scrape(), "ctr_ps_silence_max_seconds") == 5.0


def test_lease_is_there_where_workers_have_one() -> None:
    server, store = Server(), ParameterStore()
    lease = Lease(seconds=30.0, on_worker_loss=WorkerLoss.FAIL)
    assert ("ctr_ps_lease_seconds", ()) not in server.scrape()

    store.join(0, INCARNATION, terms={}, lease=lease).result()
    server.metrics = ServerMetrics(store.engine, {}, server.backlog, lambda: None)

    assert value(server.scrape(), "ctr_ps_lease_seconds") == 30.0


async def test_workers_have_no_labels() -> None:
    server = Server(num_workers=3)
    await server.push(10)

    assert not any("worker" in dict(labels) for _, labels in server.scrape())


def test_saves_are_counted(tmp_path: Path) -> None:
    server = Server()
    assert value(server.scrape(), "ctr_ps_saves_total") == 0

    server.store.save(SaveRequest(url=str(tmp_path / "a")))

    samples, save = server.scrape(), server.store.status().last_save
    assert save is not None
    assert value(samples, "ctr_ps_saves_total") == 1
    assert value(samples, "ctr_ps_save_running") == 0
    assert value(samples, "ctr_ps_save_duration_seconds") == save.duration_s > 0
    assert value(samples, "ctr_ps_save_pause_seconds") == save.pause_s < save.duration_s
    assert server.status().figures["pause of the last save, ms"] == 1e3 * save.pause_s


async def test_staleness_has_the_same_buckets_however_little_was_seen() -> None:
    server = Server()
    await server.push(10)
    name = "ctr_ps_push_staleness_bucket"
    samples = server.scrape()

    bounds = {
        dict(labels)["le"]: count for (each, labels), count in samples.items() if each == name
    }

    assert list(map(float, bounds)) == [*STALENESS_BOUNDS, np.inf]
    assert set(bounds.values()) == {1.0}


async def test_page_on_monitoring_has_each_metric_and_no_other(tmp_path: Path) -> None:
    class Log:
        size_bytes = num_appended = appended_bytes = num_waiting = 0
        replay_s = 0.0

    server = Server(log=Log, replayed=Replayed(calls=0, load_s=0.0, replay_s=0.0))
    server.store.save(SaveRequest(url=str(tmp_path / "a")))
    await server.push(10)
    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in server.metrics.collect()
    }

    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")

    assert set(re.findall("(?:ctr_ps|rpc_server)_[a-z_]+", page)) == names | {
        "ctr_ps_lease_seconds"
    }


def test_figures_of_the_update_log_are_its_own() -> None:
    class Log:
        size_bytes, num_appended, appended_bytes, num_waiting = 1_000, 20, 3_000, 4
        replay_s = 2.5

    samples = Server(log=Log, replayed=Replayed(calls=90, load_s=1.0, replay_s=2.0)).scrape()

    assert value(samples, "ctr_ps_update_log_size_bytes") == 1_000
    assert value(samples, "ctr_ps_update_log_records_total") == 20
    assert value(samples, "ctr_ps_update_log_appended_bytes_total") == 3_000
    assert value(samples, "ctr_ps_update_log_waiting_records") == 4
    assert value(samples, "ctr_ps_update_log_replay_seconds") == 2.5
    assert value(samples, "ctr_ps_recovery_seconds") == 3.0
    assert value(samples, "ctr_ps_recovery_calls") == 90


async def test_refused_calls_are_counted() -> None:
    server = Server()

    with server.backlog.holding(5):
        assert value(server.scrape(), "ctr_ps_backlog_calls") == 1
        assert value(server.scrape(), "ctr_ps_backlog_bytes") == 5
        with pytest.raises(RuntimeError):
            await server.pull(3)
    samples = server.scrape()

    assert value(samples, "ctr_ps_overload_refusals_total") == 1
    assert value(samples, "ctr_ps_backlog_calls") == 0


def test_durations_of_calls_are_in_seconds() -> None:
    server = Server()
    pulls = server.service.counts["PullSparse"]
    pulls.ended("OK", 0.02)
    pulls.ended("OK", 11.0)
    name = "rpc_server_call_duration_seconds"
    buckets = {
        float(dict(labels)["le"]): count
        for (each, labels), count in server.scrape().items()
        if each == f"{name}_bucket"
    }

    assert [*buckets] == [*BOUNDS_S, np.inf]
    assert (buckets[0.01], buckets[0.025], buckets[10.0], buckets[np.inf]) == (0, 1, 1, 2)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (BOUNDS_S[0], 0), (0.0002, 1), (11.0, len(BOUNDS_S))]
)
def test_seconds_are_counted_in_the_first_bucket_whose_bound_they_do_not_exceed(
    seconds: float, bucket: int
) -> None:
    histogram = Histogram()

    histogram.add(seconds)

    assert histogram.counts[bucket] == sum(histogram.counts) == 1
    assert histogram.total_s == seconds


# The status page


def rows_of(status: Status, title: str) -> list[dict[str, object]]:
    (table,) = [each for each in status.tables if each.title.startswith(title)]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


async def test_page_shows_workers_tables_and_calls(tmp_path: Path) -> None:
    server = Server(num_workers=3)

    for sequence in range(3):
        await server.push(10, worker=0, sequence=sequence, examples=100)
    await server.push(10, worker=1, sequence=0, examples=100)
    for _ in range(3):
        await server.pull(10)
    server.store.leave(2, step=0)
    server.store.engine.pass_time(4.0)
    server.store.save(SaveRequest(url=str(tmp_path / "a")))
    status = server.status()

    assert status.title == "ctr-ps server 0 of 1"
    assert status.figures["version"] == 4
    assert status.figures["saves"] == 1
    first, second, third = rows_of(status, "Workers")
    assert (first["state"], first["examples"], first["silent, s"]) == ("present", 300, 4.0)
    assert (second["state"], second["behind"]) == ("present", 2)
    assert (third["state"], third["step"], third["silent, s"]) == ("has left", None, None)
    (table,) = rows_of(status, "Tables")
    assert (table["table"], table["rows"], table["shards"]) == ("t", 10, 4)
    of_store = server.store.status().tables["t"]
    assert (table["load"], table["imbalance"]) == (of_store.load_factor, of_store.imbalance)
    assert of_store.load_factor != of_store.imbalance
    push, pull = rows_of(status, "Calls")
    assert (push["call"], push["number"]) == ("PushGrad", 4)
    assert (pull["call"], pull["number"], pull["of it waiting"]) == ("PullSparse", 3, 0.0)
    series = {each.name: each.value for each in status.series}
    assert (series["batches a second"], series["examples a second"]) == (4, 400)
    assert (series["calls a second"], series["rows"]) == (7, 10)


def test_page_says_why_the_job_has_ended() -> None:
    server = Server()
    server.store.abort(0, "a fault of its own")

    assert "a fault of its own" in server.status().fault


def test_page_shows_the_mean_of_calls_and_the_share_of_it_that_was_waiting() -> None:
    server = Server()
    pulls = server.service.counts["PullSparse"]
    for seconds in (0.5, 3.5):
        pulls.ended("OK", seconds)
    pulls.waits.add(1.0)
    pulls.received_bytes, pulls.sent_bytes = 2**20, 3 * 2**20

    (pull,) = rows_of(server.status(), "Calls")

    assert (pull["number"], pull["ms, mean"], pull["of it waiting"]) == (2, 2_000.0, 0.25)
    assert (pull["MiB in"], pull["MiB out"]) == (1.0, 3.0)
