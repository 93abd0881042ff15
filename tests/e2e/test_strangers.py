"""Callers without a token beside a job: it goes on, takes others in, and trains the same model as alone."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import generated
from tests.support.http2 import CHECK, WATCH, Connection, bomb, message
from tests.support.process_figures import Peak, peaks_until_end
from tests.support.running_job import LIMIT_S, RunningJob, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "admin-0123456789"
DESCRIPTORS = 1024
SILENT = 2_000
BOMBS = 1_000
UNFINISHED = 1_000
"""Of both servers together, each time."""
MOST_MB = 100
SAME = ("model_digest", "auc", "log_loss", "examples")


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Lets this process open as many connections as it has strangers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * SILENT + 512:
        pytest.skip(f"a process may have {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=20_000, test_rows=2_000, files=2)


@contextmanager
def strangers(ports: list[int]) -> Iterator[None]:
    """Has them send what swells and what does not end to the ports, and then connect and be silent."""
    swelling, unfinished = bomb(16 * 2**20 - 64), message(bytes(2**20))[:-1]
    with ExitStack() as stack:
        for port in ports:
            with suppress(ConnectionError):  # the server may end what sends such messages
                connection = stack.enter_context(Connection(port))
                calls = [
                    connection.call(CHECK, {"grpc-encoding": "gzip"})
                    for _ in range(BOMBS // len(ports))
                ]
                connection.send(dict.fromkeys(calls, swelling), end=True)
            for path in (CHECK, WATCH):
                with suppress(ConnectionError):
                    connection = stack.enter_context(Connection(port))
                    number = UNFINISHED // len(ports) // 2
                    calls = [connection.call(path) for _ in range(number)]
                    connection.send(dict.fromkeys(calls, unfinished), end=False)
            for _ in range(SILENT):
                with suppress(ConnectionError):  # there is no place for it
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
        yield


def trained(
    folder: Path, data: Path, *, disturbed: bool
) -> tuple[dict[str, Any], dict[str, Peak], str]:
    """Trains with a worker that comes late; returns what it came to, the servers' peaks, and their logs."""
    settings = {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "model.hidden": "[16]",
        "train.batch_size": "64",
        "train.epochs": "2",
        "train.log_every_s": "0.1",
        "checkpoint.dir": f"{folder}/checkpoints",
        "checkpoint.every_steps": "20",
        "strategy": "{mode='sync'}",
    }
    with (
        RunningJob(
            folder,
            training(settings),
            num_workers=1,
            job_size=2,
            environment={"CTR_PS_TOKEN": TOKEN},
        ) as job,
        ExitStack() as stack,
    ):
        for name in job.servers:
            limits = (DESCRIPTORS, DESCRIPTORS)
            resource.prlimit(job.processes[name].pid, resource.RLIMIT_NOFILE, limits)
        job.wait_for("server.0", "worker 0 joins")
        if disturbed:
            stack.enter_context(strangers(job.ports))
        job.start("worker.1")
        job.wait_for("worker.1", r" step=\d+ ")
        if disturbed:
            stack.enter_context(strangers(job.ports))
        pids = {name: process.pid for name, process in job.processes.items()}
        peaks = peaks_until_end(pids, list(pids), limit_s=LIMIT_S)
        codes = job.wait()
        assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
        result = job.result()
        logs = "".join(map(job.log, job.servers))
        return {name: result[name] for name in SAME}, {n: peaks[n] for n in job.servers}, logs


@pytest.mark.usefixtures("descriptors")
def test_job_goes_on_beside_strangers(data: Path, tmp_path: Path) -> None:
    """Its servers have 1024 descriptors, and begin a segment of their update logs with each checkpoint."""
    undisturbed, usual, _ = trained(tmp_path / "undisturbed", data, disturbed=False)
    disturbed, peaks, logs = trained(tmp_path / "disturbed", data, disturbed=True)

    assert disturbed == undisturbed
    for name, peak in peaks.items():
        assert peak.memory_mb < usual[name].memory_mb + MOST_MB, name
    assert "Too many open files" not in logs
