"""What a server tells Prometheus, compared with what was done to it."""

import asyncio
import re
from pathlib import Path

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protos.chunking import PushChunk
from protos.gradients import SparseGrad
from protos.placement import FIRST_EPOCH
from protos.runtime.status_page.status import Status
from protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from protos.store import Missing, SaveRequest
from protos.wire import calls, requests
from ps_server.rpc.activity import Activity
from ps_server.rpc.backlog import Backlog
from ps_server.rpc.handlers import Handlers
from ps_server.rpc.metrics.call_metrics import BOUNDS_S, Histogram
from ps_server.rpc.metrics.hot_keys import LEAST_SEEN, HotKeys
from ps_server.rpc.metrics.server_metrics import STALENESS_BOUNDS, ServerMetrics
from ps_server.rpc.metrics.server_status import server_status
from ps_server.rpc.service import Service
from ps_server.store import ParameterStore
from tests.support.stores import joined, push_id

ROOT = Path(__file__).parents[4]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
METHOD = "ctr_ps.v1.ParameterServer/{}"


class Server:
    """A store, its service without a network, and its metrics."""

    def __init__(self, num_workers: int = 1, *, per_worker: bool = False) -> None:
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
        self.hot_keys = HotKeys()
        self.service = Service(
            Handlers(self.store), Activity(), backlog=self.backlog, hot_keys=self.hot_keys
        )
        self.metrics = ServerMetrics(
            self.store, self.service.counts, self.backlog, lambda: None, per_worker=per_worker
        )

    async def call(self, call: calls.Call, argument: object) -> None:
        message = call.request.encode(argument).SerializeToString()
        answer = await self.service.method(call)(message, _Context())
        self.service._serializer(call)(answer)

    async def push(
        self, num_keys: int, worker: int = 0, at: int | None = None, sequence: int | None = None
    ) -> None:
        keys = np.arange(num_keys, dtype=np.uint64)
        grad = SparseGrad(keys, np.ones((num_keys, 2), np.float32), 1)
        request = requests.PushGrad(
            chunk=PushChunk([("t", grad)], []),
            push_id=push_id(worker, sequence),
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
        return server_status(self.store, self.service.counts, self.service.hot_keys)

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


def test_calls_are_counted_with_their_status_bytes_and_keys() -> None:
    server = Server()

    async def body() -> None:
        await server.push(10)
        await server.pull(3)
        await server.pull(4)
        with pytest.raises(RuntimeError, match="FAILED_PRECONDITION"):
            await server.push(5, worker=7)

    asyncio.run(body())
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


def test_waiting_for_other_workers_is_told_apart() -> None:
    server = Server(num_workers=2)

    async def body() -> None:
        waiting = asyncio.create_task(server.pull(3, at=1))
        await asyncio.sleep(0)  # it has begun
        await server.push(3, worker=0, at=0)
        assert not waiting.done()
        await server.push(3, worker=1, at=0)
        await waiting

    asyncio.run(body())
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


def test_call_whose_client_is_gone_is_counted_as_cancelled() -> None:
    server = Server(num_workers=2)

    async def body() -> None:
        waiting = asyncio.create_task(server.pull(3, at=1))
        await asyncio.sleep(0)  # it has begun
        await server.push(3, worker=0, at=0)
        waiting.cancel()
        await asyncio.wait([waiting])

    asyncio.run(body())

    assert duration_count(server.scrape(), "PullSparse", "CANCELLED") == 1


def test_tables_and_progress_are_those_of_the_status() -> None:
    server = Server()
    asyncio.run(server.push(100))
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


def test_rows_that_left_a_table_still_count_as_created() -> None:
    server = Server()
    asyncio.run(server.push(100))
    server.store.shrink(max_norm=100.0)  # all rows are below
    samples = server.scrape()

    assert value(samples, "ctr_ps_table_rows", table="t") == 0
    assert value(samples, "ctr_ps_table_rows_expired_total", table="t") == 100
    assert value(samples, "ctr_ps_table_rows_created_total", table="t") == 100


def test_workers_are_counted_by_state() -> None:
    server = Server(num_workers=3, per_worker=True)
    server.store.leave(1, step=0)

    def states() -> dict[str, float]:
        samples = server.scrape()
        names = ("present", "left", "lost", "missing")
        return {name: value(samples, "ctr_ps_workers", state=name) for name in names}

    assert states() == {"present": 2, "left": 1, "lost": 0, "missing": 0}
    server.store.pass_time(5.0)
    assert value(server.scrape(), "ctr_ps_silence_max_seconds") == 5.0
    assert value(server.scrape(), "ctr_ps_job_worker_silence_seconds", worker="2") == 5.0


def test_workers_have_no_labels_unless_asked_for() -> None:
    server = Server(num_workers=3)
    asyncio.run(server.push(10))

    assert not any("worker" in dict(labels) for _, labels in server.scrape())


def test_saves_are_counted(tmp_path: Path) -> None:
    server = Server()
    assert value(server.scrape(), "ctr_ps_saves_total") == 0

    server.store.save(SaveRequest(url=str(tmp_path / "a")))

    samples = server.scrape()
    assert value(samples, "ctr_ps_saves_total") == 1
    assert value(samples, "ctr_ps_save_running") == 0
    assert value(samples, "ctr_ps_save_duration_seconds") > 0


def test_staleness_has_the_same_buckets_however_little_was_seen() -> None:
    server = Server()
    asyncio.run(server.push(10))
    name = "ctr_ps_push_staleness_bucket"
    samples = server.scrape()

    bounds = {
        dict(labels)["le"]: count for (each, labels), count in samples.items() if each == name
    }

    assert list(map(float, bounds)) == [*STALENESS_BOUNDS, np.inf]
    assert set(bounds.values()) == {1.0}


def test_page_on_monitoring_has_each_metric_and_no_other(tmp_path: Path) -> None:
    class Log:
        size_bytes = num_appended = appended_bytes = num_waiting = 0

    server = Server(per_worker=True)
    server.metrics = ServerMetrics(
        server.store, server.service.counts, server.backlog, Log, per_worker=True
    )
    server.store.save(SaveRequest(url=str(tmp_path / "a")))
    asyncio.run(server.push(10))
    names = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in server.metrics.collect()
    }

    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")

    assert set(re.findall("(?:ctr_ps|rpc_server)_[a-z_]+", page)) == names | {
        "ctr_ps_lease_seconds"
    }


def test_refused_calls_are_counted() -> None:
    server = Server()

    async def body() -> None:
        with server.backlog.holding(5):
            assert value(server.scrape(), "ctr_ps_backlog_calls") == 1
            assert value(server.scrape(), "ctr_ps_backlog_bytes") == 5
            with pytest.raises(RuntimeError):
                await server.pull(3)

    asyncio.run(body())
    samples = server.scrape()

    assert value(samples, "ctr_ps_overload_refusals_total") == 1
    assert value(samples, "ctr_ps_backlog_calls") == 0


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


def test_page_shows_workers_tables_and_calls(tmp_path: Path) -> None:
    server = Server(num_workers=3)

    async def body() -> None:
        for sequence in range(3):
            await server.push(10, worker=0, sequence=sequence)
        await server.push(10, worker=1, sequence=0)
        for _ in range(LEAST_SEEN):
            server.hot_keys._until_next = 0
            await server.pull(10)

    asyncio.run(body())
    server.store.leave(2, step=0)
    server.store.pass_time(4.0)
    server.store.save(SaveRequest(url=str(tmp_path / "a")))
    status = server.status()

    assert status.title == "ctr-ps server 0 of 1"
    assert status.figures["version"] == 4
    assert status.figures["saves"] == 1
    first, second, third = rows_of(status, "Workers")
    assert (first["state"], first["examples"], first["silent, s"]) == ("present", 3, 4.0)
    assert (second["state"], second["behind"]) == ("present", 2)
    assert (third["state"], third["step"], third["silent, s"]) == ("has left", None, None)
    (table,) = rows_of(status, "Tables")
    assert (table["table"], table["rows"], table["shards"]) == ("t", 10, 4)
    push, pull = rows_of(status, "Calls")
    assert (push["call"], push["number"]) == ("PushGrad", 4)
    assert (pull["call"], pull["number"], pull["of it waiting"]) == ("PullSparse", 3, 0.0)
    assert {each.name: each.value for each in status.series}["batches a second"] == 4
    hot = rows_of(status, "Hot keys")
    assert {(each["table"], each["share"]) for each in hot} == {("t", 1.0)}
    assert {each["key"] for each in hot} == set(map(str, range(10)))


def test_page_says_why_the_job_has_ended() -> None:
    server = Server()
    server.store.abort(0, "a fault of its own")

    assert "a fault of its own" in server.status().fault
