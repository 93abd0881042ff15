"""What a process takes grows at most linearly with the cluster: 4, 8 and 16 servers and as many workers.

Servers are on one side of a delay line, workers on the other, 1 ms apart. Each worker trains on as many
batches in each cluster. A cost of a process that is a + b N for N servers and N workers grows from 8 to 16 by
twice of what it grows from 4 to 8, one with N^2 by four times.
"""

import json
import secrets
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ctr_ps.ps_server.rpc.server import ALL_LEFT
from tests.support.commands import ROOT, generated, result_of
from tests.support.network import delayed_network
from tests.support.process_figures import Peak, peaks_until_end
from tests.support.running_job import RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = (4, 8, 16)
MOST = SIZES[-1]
ASYNC = 8
"""Size of the asynchronous cluster, which makes three times as many calls as a synchronous one."""

BATCH, STEPS = 64, 16
TEST_ROWS = 2_000
DELAY_S = 0.001
LIMIT_S = 400.0

FAR_S = 0.025
"""Delay of a line whose round trips are longer than what 17 processes of two cores add to a step."""

BY_TIME = {"GetStatus", "Renew"}
"""Calls whose number depends on how long processes take."""

SCRAPE = """
import json, sys, urllib.request as web
as_reader = {"Authorization": "Bearer " + sys.argv[1]}
pages = [web.urlopen(web.Request(url, headers=as_reader)).read().decode() for url in sys.argv[2:]]
print(json.dumps(pages))
"""


@dataclass(frozen=True)
class Done:
    """A job that has ended.

    Attributes:
        result: Of worker 0.
        calls: Of each server, by name.
        received_bytes: That each server received, by name of the call.
        sent_bytes: That each server sent, by name of the call.
        servers: What each server took.
        workers: What each worker took.
    """

    result: Mapping[str, Any]
    calls: Sequence[Counter[str]]
    received_bytes: Sequence[Counter[str]]
    sent_bytes: Sequence[Counter[str]]
    servers: Sequence[Peak]
    workers: Sequence[Peak]


class Jobs:
    """Jobs on the same data, each of which runs when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Generates a file for each worker of the largest cluster."""
        self._folder = folder
        generated(folder, rows=BATCH * STEPS * MOST, test_rows=TEST_ROWS, files=MOST)
        self.files = sorted((folder / "train").iterdir())
        self.done = cache(self._run)
        self.alone = cache(self._run_alone)

    def settings(self, mode: str, files: Sequence[Path], batch: int = BATCH) -> dict[str, str]:
        return {
            "data.train": json.dumps(list(map(str, files))),
            "data.test": f"{self._folder}/test/part-*",
            "model.hidden": "[64]",
            "train.batch_size": str(batch),
            "train.base_rate": "0.2",  # not of worker 0's rows, which differ
            "strategy.mode": mode,
            "cluster.lease_s": "60",
            "cluster.connect_timeout_s": "300",
        }

    def _run_alone(self) -> dict[str, Any]:
        """One process without servers, each of whose batches has those of all 16 workers, in their order."""
        parts = [path.read_text().splitlines(keepends=True) for path in self.files]
        rows = self._folder / "all.tsv"
        with rows.open("w") as file:
            for start in range(0, BATCH * STEPS, BATCH):
                for part in parts:
                    file.writelines(part[start : start + BATCH])
        settings = self.settings("sync", [rows], BATCH * MOST)
        overrides = [f"--set={name}={value}" for name, value in settings.items()]
        return result_of("ps-worker", "train", ROOT / "examples/ctr_dnn.toml", *overrides)

    def _run(self, mode: str, size: int) -> Done:
        """Trains on a cluster, whose servers stay until their metrics are read."""
        self.alone()  # compiles all kernels, once for all
        servers, workers = _names("server", size), _names("worker", size)
        token = secrets.token_urlsafe(32)
        with (
            delayed_network(servers, workers, delay_s=DELAY_S) as network,
            RunningJob(
                self._folder / f"{mode}-{size}",
                training(self.settings(mode, self.files[:size])),
                num_servers=size,
                num_workers=size,
                update_logs=False,
                server_options=["--stay", "--metrics=0"],
                environment={"CTR_PS_TOKEN": token, "OMP_NUM_THREADS": "1"},
                network=network,
            ) as job,
        ):
            pids = {name: process.pid for name, process in job.processes.items()}
            peaks = peaks_until_end(pids, workers, limit_s=LIMIT_S)
            codes = job.wait(*workers)
            assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
            urls = []
            for server in servers:
                job.wait_for(server, ALL_LEFT)
                urls.append(job.wait_for(server, r"metrics at (\S+/metrics)")[1])
            scrape = network.command(servers[0], [sys.executable, "-c", SCRAPE, token, *urls])
            scraped = subprocess.run(
                list(map(str, scrape)), capture_output=True, text=True, timeout=LIMIT_S, check=True
            )
            for server in servers:
                job.processes[server].terminate()
            codes = job.wait()
            assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
            metrics = list(map(_by_call, json.loads(scraped.stdout)))
            done = Done(
                result=job.result(),
                calls=[each["rpc_server_call_duration_seconds_count"] for each in metrics],
                received_bytes=[each["ctr_ps_received_bytes_total"] for each in metrics],
                sent_bytes=[each["ctr_ps_sent_bytes_total"] for each in metrics],
                servers=[peaks[name] for name in servers],
                workers=[peaks[name] for name in workers],
            )
        _print(mode, size, done)
        return done


def _names(kind: str, size: int) -> list[str]:
    return [f"{kind}.{index}" for index in range(size)]


def _by_call(page: str) -> dict[str, Counter[str]]:
    """Returns the numbers of each metric by name of the call."""
    numbers: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if "rpc_method" in sample.labels:
                call = sample.labels["rpc_method"].partition("/")[2]
                numbers.setdefault(sample.name, Counter())[call] += int(sample.value)
    return numbers


def _print(mode: str, size: int, done: Done) -> None:
    """Prints a JSON line with what a process took, on the average."""
    figures = {
        f"{name}_of_a_{kind}": round(statistics.mean(getattr(peak, name) for peak in peaks), 2)
        for kind, peaks in (("server", done.servers), ("worker", done.workers))
        for name in ("processor_s", "memory_mb", "threads", "sockets")
    }
    figures["calls_of_a_server"] = statistics.mean(each.total() for each in done.calls)
    figures["bytes_of_a_step_of_a_worker"] = round(bytes_of_a_step(done))
    print(json.dumps({"mode": mode, "size": size, **figures}))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("growth"))


def assert_at_most_linear(costs: Sequence[float], *, slack: float) -> None:
    """Costs of the three sizes; `slack` is what may differ without a reason."""
    small, middle, large = costs
    first, second = middle - small, large - middle
    assert second <= 2.5 * max(first, 0.0) + slack, costs


def bytes_of_a_step(done: Done) -> float:
    """Returns the bytes that a worker sends and gets in a step in which it pushes."""
    moved = sum(
        of_server[call]
        for each in (done.received_bytes, done.sent_bytes)
        for of_server in each
        for call in ("PushPull", "PushGrad")
    )
    return moved / (len(done.workers) * STEPS)


def mean_of(name: str, peaks: Sequence[Peak]) -> float:
    return float(statistics.mean(getattr(peak, name) for peak in peaks))


# What a cluster learns


def test_sixteen_workers_learn_what_one_process_does_with_their_batches_together(
    jobs: Jobs,
) -> None:
    expected = jobs.alone()

    found = jobs.done("sync", MOST).result

    assert found["examples"] == expected["examples"] == BATCH * STEPS * MOST
    assert found["auc"] == pytest.approx(expected["auc"], abs=1e-5)
    assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-5)
    assert found["duplicates"] == 0


def test_asynchronous_workers_lose_nothing_and_repeat_nothing(jobs: Jobs) -> None:
    found = jobs.done("async", ASYNC).result

    assert found["examples"] == BATCH * STEPS * ASYNC
    # Of all servers together: each push that was applied, once.
    assert found["staleness"]["batches"] == ASYNC * ASYNC * STEPS
    assert found["duplicates"] == 0


# Calls and bytes


@pytest.mark.parametrize("size", SIZES)
def test_worker_calls_each_server_once_in_a_synchronous_step(jobs: Jobs, size: int) -> None:
    done = jobs.done("sync", size)

    for calls in done.calls:
        assert calls["PushPull"] + calls["PushGrad"] == size * STEPS


@pytest.mark.parametrize("place", ["first", "last"])
def test_every_kind_of_call_to_a_server_grows_linearly(jobs: Jobs, place: str) -> None:
    index = 0 if place == "first" else -1
    small, middle, large = (jobs.done("sync", size).calls[index] for size in SIZES)

    others = {
        name: (small[name], middle[name], large[name])
        for name in (small | middle | large).keys() - BY_TIME
        if large[name] - middle[name] != 2 * (middle[name] - small[name])
    }
    assert others == {}


def test_asynchronous_worker_calls_each_server_thrice_a_batch(jobs: Jobs) -> None:
    done = jobs.done("async", ASYNC)

    for calls in done.calls:
        assert calls["PushGrad"] == ASYNC * STEPS
        # With what worker 0 evaluates.
        for name in ("PullSparse", "PullDense"):
            assert calls[name] <= ASYNC * (STEPS + 4) + -(-TEST_ROWS // BATCH), name


def test_worker_sends_and_gets_as_many_bytes_in_a_step_of_any_cluster(jobs: Jobs) -> None:
    per_step = [bytes_of_a_step(jobs.done("sync", size)) for size in SIZES]

    assert per_step[-1] < 1.1 * per_step[0], per_step


@pytest.mark.parametrize("place", ["first", "last"])
def test_bytes_of_a_server_grow_linearly(jobs: Jobs, place: str) -> None:
    index = 0 if place == "first" else -1
    totals = []
    for size in SIZES:
        done = jobs.done("sync", size)
        totals.append(sum(each[index].total() for each in (done.received_bytes, done.sent_bytes)))

    # Servers have not all the same number of keys.
    assert_at_most_linear(totals, slack=0.1 * totals[0])


# What processes take


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["servers", "workers"])
def test_process_has_two_connections_for_each_of_its_peers(
    jobs: Jobs, mode: str, kind: str
) -> None:
    """One of gRPC, and a stream."""
    sizes = SIZES if mode == "sync" else (ASYNC,)

    for size in sizes:
        for peak in getattr(jobs.done(mode, size), kind):
            assert 2 * size <= peak.sockets <= 2 * size + 8


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["servers", "workers"])
def test_threads_of_a_process_are_as_many_as_its_peers_and_some(
    jobs: Jobs, mode: str, kind: str
) -> None:
    """A worker has one that reads each stream, beside those of gRPC."""
    sizes = SIZES if mode == "sync" else (ASYNC,)

    for size in sizes:
        for peak in getattr(jobs.done(mode, size), kind):
            assert peak.threads <= (2 if kind == "workers" else 1) * size + 20


@pytest.mark.parametrize("kind", ["servers", "workers"])
def test_memory_of_a_process_grows_linearly(jobs: Jobs, kind: str) -> None:
    memory = [mean_of("memory_mb", getattr(jobs.done("sync", size), kind)) for size in SIZES]

    assert_at_most_linear(memory, slack=8.0)


@pytest.mark.parametrize("kind", ["servers", "workers"])
def test_processor_time_of_a_process_grows_linearly(jobs: Jobs, kind: str) -> None:
    seconds = [mean_of("processor_s", getattr(jobs.done("sync", size), kind)) for size in SIZES]

    # The start of a process takes 2 s, and more where others are at work.
    assert_at_most_linear(seconds, slack=1.0)


# Time


@pytest.fixture(scope="module")
def step_seconds(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Seconds of a step of one worker far away from its servers, by their number; these end by themselves."""
    jobs.alone()
    seconds = {}
    for num_servers in (2, MOST):
        hosts = _names("server", num_servers), _names("worker", 1)
        with (
            delayed_network(*hosts, delay_s=FAR_S) as network,
            RunningJob(
                tmp_path_factory.mktemp(f"far-{num_servers}"),
                training(jobs.settings("sync", jobs.files[:1])),
                num_servers=num_servers,
                num_workers=1,
                update_logs=False,
                environment={"CTR_PS_TOKEN": secrets.token_urlsafe(32), "OMP_NUM_THREADS": "1"},
                network=network,
            ) as job,
        ):
            codes = job.wait(limit_s=LIMIT_S)
            assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
            seconds[num_servers] = BATCH / job.result()["examples_per_s"]
    print(json.dumps({"delay_s": FAR_S, "seconds_of_a_step_by_servers": seconds}))
    return seconds


def test_step_waits_for_all_servers_at_once(step_seconds: Mapping[int, float]) -> None:
    round_trip_s = 2 * FAR_S
    few, many = step_seconds[2], step_seconds[MOST]

    assert few >= round_trip_s
    assert many - few < 4 * round_trip_s  # one after the other they would take 14 more
