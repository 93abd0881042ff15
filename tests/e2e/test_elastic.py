"""Workers that join a running job and leave it: each row is trained once."""

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.table.rows.statistics import SHOW
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from tests.support.commands import generated
from tests.support.running_job import LIMIT_S, RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FILES, ROWS, BATCH = 12, 40_000, 32
EPOCHS = 3
NUM_SLOTS = 26
LEASE_S = 5.0
MODES = {"async": 2 + 5 + 4 * 5, "half_async": 1}
"""Batches of a killed worker that may be trained twice."""
TERMINATED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=ROWS, test_rows=100, files=FILES)


def elastic(folder: Path, data: Path, mode: str, **others: str) -> RunningJob:
    """Starts 2 servers and 2 workers of a job with places for 4."""
    settings = {
        "data.train": f"{data}/train/part-*",
        "data.test": "[]",
        "data.deal": "queue",
        "model.hidden": "[16]",
        "train.batch_size": str(BATCH),
        "train.epochs": str(EPOCHS),
        "train.log_every_s": "0.1",
        "life.statistics": "true",
        "life.shrink_every_epochs": "0",  # so that shows are counts
        "checkpoint.dir": f"{folder}/checkpoints",
        "strategy": f"{{mode='{mode}'}}",
        "cluster.lease_s": str(LEASE_S),
        "cluster.on_worker_loss": "continue",
    }
    return RunningJob(folder, training({**settings, **others}), job_size="2:4")


def shows(folder: Path) -> Counter[int]:
    """Returns the shows of all keys in the last checkpoint."""
    checkpoint = Checkpoint.open(f"{folder}/checkpoints/LATEST")
    found: Counter[int] = Counter()
    for table in checkpoint.tables.values():
        for _, rows in checkpoint.read_shards(table.name, range(table.num_shards)):
            shown = rows.statistics[:, SHOW].astype(int).tolist()
            found.update(dict(zip(rows.keys.tolist(), shown, strict=True)))
    return found


def occurrences(data: Path) -> Counter[int]:
    """Returns the occurrences of all keys in the epochs of a job."""
    dataset = QueueDataset(Schema.load("criteo"), 1024)
    dataset.set_filelist(sorted((data / "train").glob("part-*")))
    found: Counter[int] = Counter()
    for batch in dataset:
        found.update(batch.keys.tolist())
    return Counter({key: EPOCHS * number for key, number in found.items()})


@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_trained_once_while_workers_join_and_leave(
    mode: str, data: Path, tmp_path: Path
) -> None:
    with elastic(tmp_path, data, mode) as job:
        job.wait_for_steps()
        job.start("worker.2")
        job.start("worker.3")
        job.wait_for("worker.2", r" step=\d+ ")
        job.processes["worker.1"].terminate()
        left = job.wait("worker.1")["worker.1"]
        job.wait_for("worker.3", "joining a running job")
        codes = job.wait()

        assert (left, {**codes, "worker.1": 0}) == (TERMINATED, dict.fromkeys(codes, 0)), job.tails
        assert job.result()["examples"] == EPOCHS * ROWS

    assert shows(tmp_path) == occurrences(data)


@pytest.mark.timeout(600)  # with two moves, and two processes that start
def test_each_row_is_trained_once_while_servers_and_workers_come_and_go(
    data: Path, tmp_path: Path
) -> None:
    def moved(*command: object, meanwhile: Callable[[], None]) -> None:
        process = job.cluster(*command)
        meanwhile()
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output + job.tails

    with elastic(tmp_path, data, "async") as job:
        job.wait_for_steps()
        job.start("worker.2")
        moved("add", job.start_spare(), meanwhile=lambda: job.start("worker.3"))
        job.wait_for("worker.3", "joining a running job")
        moved("drain", 1, meanwhile=job.processes["worker.1"].terminate)
        codes = job.wait()

        assert codes == {**dict.fromkeys(codes, 0), "worker.1": TERMINATED}, job.tails
        assert job.result()["examples"] == EPOCHS * ROWS

    assert shows(tmp_path) == occurrences(data)


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_worker_loses_no_row_and_a_restarted_server_deals_on(
    mode: str, data: Path, tmp_path: Path
) -> None:
    with elastic(tmp_path, data, mode) as job:
        job.wait_for_steps()
        job.start("worker.2")
        job.wait_for("worker.2", r" step=\d+ ")
        job.restart("worker.1")  # which waits for the end of the lease
        job.restart("server.0")
        job.wait_for("worker.1", "joining a running job")
        codes = job.wait()
        assert codes == dict.fromkeys(codes, 0), job.tails

    found, expected = shows(tmp_path), occurrences(data)
    again = Counter({key: found[key] - number for key, number in expected.items()})
    assert found.keys() == expected.keys()
    assert min(again.values()) >= 0
    # docs/consistency.md: pushes of the killed worker that had reached some servers only
    assert sum(again.values()) <= MODES[mode] * BATCH * NUM_SLOTS
