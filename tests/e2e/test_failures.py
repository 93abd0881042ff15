"""Processes that die in mid-run: nobody waits for ever, and everybody says for whom it waited."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.commands import COMMANDS, ROOT, clean_environment, run
from tests.support.processes import environment_of, free_port, server_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT_S = 90.0
SERVER_WAIT_S = 2.0
SERVER_IDLE_S = 15.0  # long enough for a busy machine to start all processes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for a pass that no test sees the end of: between passes a worker waits for the others."""
    folder = tmp_path_factory.mktemp("data")
    done = run("ps-data", "generate", folder, "--rows", 100_000, "--test-rows", 200, "--files", 2)
    assert done.returncode == 0, done.stderr
    return folder


class Worker:
    """A running `ps-worker train` whose log can be waited on."""

    def __init__(self, data: Path, ports: list[int], index: int, mode: str) -> None:
        role = environment_of(ports, 0, num_workers=2)
        role = {name: value for name, value in role.items() if name.startswith("PADDLE_P")}
        del role["PADDLE_PORT"]
        self.process = subprocess.Popen(
            [
                COMMANDS / "ps-worker",
                "train",
                ROOT / "examples/ctr_dnn.toml",
                f"--set=data.train={data}/train/part-*",
                "--set=data.test=[]",
                "--set=model.hidden=[16]",
                "--set=train.batch_size=1",
                "--set=train.log_every_s=0.2",
                f"--set=strategy={{mode='{mode}'}}",
            ],
            env={
                **clean_environment(),
                **role,
                "TRAINING_ROLE": "TRAINER",
                "PADDLE_TRAINERS_NUM": "2",
                "PADDLE_TRAINER_ID": str(index),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def step(self) -> int:
        """Reads the log up to the next line of progress, and returns the step it tells."""
        assert self.process.stderr is not None
        while (told := re.search(r"step=(\d+) ", line := self.process.stderr.readline())) is None:
            assert line, "the worker ended while it should have trained"
        return int(told[1])

    def wait(self) -> str:
        """Waits for its end and returns the rest of its log."""
        return self.process.communicate(timeout=LIMIT_S)[1]

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def running(data: Path, folder: Path, mode: str) -> Iterator[tuple[list, list[Worker]]]:
    """Two servers that do not wait for long, and two workers that train."""
    with ExitStack() as stack:
        with free_port() as first, free_port() as second:
            ports = [first, second]
        limits = [f"--idle-limit={SERVER_IDLE_S}", f"--wait-limit={SERVER_WAIT_S}"]
        servers = [
            stack.enter_context(
                server_process(
                    environment_of(ports, index, num_workers=2),
                    folder / f"pserver.{index}.log",
                    *limits,
                )
            )
            for index in range(2)
        ]
        workers = []
        for index in range(2):
            workers.append(Worker(data, ports, index, mode))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.step()
        yield servers, workers


def test_worker_killed_in_sync_leaves_nobody_waiting(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path, "sync") as (servers, workers):
        workers[1].process.send_signal(signal.SIGKILL)
        log = workers[0].wait()
        codes = [server.wait() for server in servers]

    assert workers[0].process.returncode == 8
    assert "[1]" in log.splitlines()[-1]
    assert codes == [9, 9]


def test_worker_killed_in_async_leaves_the_other_training(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path, "async") as (_, workers):
        workers[1].process.kill()
        killed_at, step_at_kill = time.monotonic(), workers[0].step()
        # Lines written before the kill are read at once, those after it as they are written.
        while time.monotonic() < killed_at + SERVER_WAIT_S + 1:
            step = workers[0].step()

        assert step > step_at_kill
        assert workers[0].process.poll() is None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_server_killed_ends_the_workers_with_its_endpoint(
    mode: str, data: Path, tmp_path: Path
) -> None:
    with running(data, tmp_path, mode) as (servers, workers):
        servers[0].process.kill()
        logs = [worker.wait() for worker in workers]

    for worker, log in zip(workers, logs, strict=True):
        assert worker.process.returncode == 4, log
        assert "127.0.0.1:" in log.splitlines()[-1]
        assert "Traceback" not in log
