"""A worker and a server that cannot reach each other for ten seconds, while all others can: nothing is lost.

Each job has a network of its own, and the default times of leases and retries.
While one is cut apart, the next one starts.
"""

import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import generated
from tests.support.network import Network, network
from tests.support.running_job import RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROWS, BATCH = 20_000, 32
CUT_OFF, AWAY_FROM = "worker.1", "server.0"
OUTAGE_S = 10.0
STILL_S = 3.0
"""By then a worker that is cut off has used up what it had pulled before."""

NUM_PROCESSES = 2
HOSTS = [f"{kind}.{index}" for kind in ("server", "worker") for index in range(NUM_PROCESSES)]
CASES = {
    "wait": {"strategy": "{mode='sync'}", "cluster.on_worker_loss": "wait"},
    "fail": {
        "strategy": "{mode='sync'}",
        "cluster.on_worker_loss": "fail",
        "cluster.stream": "false",
    },
    "async": {"strategy": "{mode='async'}"},
}
WITH_LOGS = {"wait"}
"""The others have to heal within the shorter `cluster.retry_s` of servers without."""

LAST_STEP = re.compile(r".* step=(\d+) ", re.DOTALL)


class Partition(threading.Thread):
    """Cuts a worker of a job off from a server for some time.

    Attributes:
        steps: The worker's last step soon after the cut, and just before its end.
    """

    def __init__(self, job: RunningJob, its_network: Network) -> None:
        super().__init__(name="partition")
        self._job = job
        self._network = its_network
        self.steps: list[int] = []
        self.start()

    def run(self) -> None:
        self._network.cut(CUT_OFF, AWAY_FROM)
        for pause_s in (STILL_S, OUTAGE_S - STILL_S):
            time.sleep(pause_s)
            match = LAST_STEP.match(self._job.log(CUT_OFF))
            self.steps.append(int(match[1]) if match else 0)
        self._network.heal(CUT_OFF, AWAY_FROM)


class Runs:
    """Jobs by name, and their partitions; "undisturbed" has none."""

    def __init__(self, folder: Path, settings: Mapping[str, str], stack: ExitStack) -> None:
        """Starts all jobs, each as soon as the one before it is cut apart."""
        self.jobs: dict[str, RunningJob] = {}
        self.partitions: dict[str, Partition] = {}
        for case, its_settings in CASES.items():
            its_network = stack.enter_context(network(HOSTS))
            command = training({**settings, **its_settings})
            has_logs = case in WITH_LOGS
            self.jobs[case] = stack.enter_context(
                RunningJob(
                    folder / case,
                    command,
                    update_logs=has_logs,
                    network=its_network,
                    # Its addresses are not loopback: nobody is served there without.
                    environment={"CTR_PS_TOKEN": secrets.token_urlsafe(32)},
                )
            )
            self.jobs[case].wait_for_steps()
            self.partitions[case] = Partition(self.jobs[case], its_network)
            stack.callback(self.partitions[case].join)
        command = training({**settings, **CASES["fail"]})
        self.jobs["undisturbed"] = stack.enter_context(RunningJob(folder / "undisturbed", command))

    def result(self, name: str) -> dict[str, Any]:
        """Waits for the end of a job without an error, and returns its figures."""
        job = self.jobs[name]
        codes = job.wait()
        assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
        if name in self.partitions:
            self.partitions[name].join()
            soon, late = self.partitions[name].steps
            assert 0 < soon == late < ROWS // BATCH // NUM_PROCESSES, "the partition cut nothing"
        return job.result()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("partition")
    generated(folder, rows=ROWS, test_rows=2_000, files=2)
    settings = {
        "data.train": f"{folder}/train/part-*",
        "data.test": f"{folder}/test/part-*",
        "model.hidden": "[16]",
        "train.batch_size": str(BATCH),
        "train.epochs": "1",
        "train.log_every_s": "0.1",
    }
    with ExitStack() as stack:
        yield Runs(folder, settings, stack)


@pytest.mark.parametrize("on_worker_loss", ["wait", "fail"])
def test_partition_does_not_change_the_model(on_worker_loss: str, runs: Runs) -> None:
    undisturbed = runs.result("undisturbed")

    result = runs.result(on_worker_loss)

    for name in ("model_digest", "auc", "log_loss", "examples"):
        assert result[name] == undisturbed[name], name


def test_partition_neither_loses_nor_repeats_an_asynchronous_push(runs: Runs) -> None:
    undisturbed = runs.result("undisturbed")

    result = runs.result("async")

    assert result["examples"] == ROWS
    # Of all servers together: each push that was applied, once.
    assert result["staleness"]["batches"] == undisturbed["staleness"]["batches"]
