"""Processes that die in mid-run: nobody waits for ever, and everybody says for whom it waited."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.commands import COMMANDS, ROOT, clean_environment, generated
from tests.support.processes import environment_of, free_port, server_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LIMIT_S = 90.0
SERVER_WAIT_S = 10.0  # workers start at once, but on a busy machine seconds apart
SERVER_IDLE_S = 20.0  # long enough for a busy machine to start all processes


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for a pass that no test sees the end of: between passes a worker waits for the others."""
    return generated(tmp_path_factory.mktemp("data"), rows=100_000, test_rows=200, files=2)


class Worker:
    """A running `ps-worker train` whose log can be waited on."""

    def __init__(
        self,
        data: Path,
        ports: list[int],
        index: int,
        mode: str,
        *,
        num_workers: int = 2,
        settings: Sequence[str] = (),
    ) -> None:
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
                f"--set=strategy.mode={mode}",
                *(f"--set={setting}" for setting in settings),
            ],
            env={
                **clean_environment(),
                **role,
                "TRAINING_ROLE": "TRAINER",
                "PADDLE_TRAINERS_NUM": str(num_workers),
                "PADDLE_TRAINER_ID": str(index),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def step(self) -> int:
        """Reads the log up to the next line of progress, and returns the step it tells."""
        assert self.process.stderr is not None
        log = ""
        while (told := re.search(r"step=(\d+) ", line := self.process.stderr.readline())) is None:
            log += line
            assert line, f"the worker ended while it should have trained\n{log}"
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
def serving(folder: Path, *, wait_s: float = SERVER_WAIT_S) -> Iterator[tuple[list, list[int]]]:
    """Two servers that do not wait for long, and their ports."""
    with ExitStack() as stack:
        with free_port() as first, free_port() as second:
            ports = [first, second]
        limits = [f"--idle-limit={SERVER_IDLE_S}", f"--wait-limit={wait_s}"]
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
        yield servers, ports


@contextmanager
def running(
    data: Path,
    folder: Path,
    mode: str,
    *,
    wait_s: float = SERVER_WAIT_S,
    settings: Sequence[str] = (),
) -> Iterator[tuple[list, list[Worker], list[int]]]:
    """Two servers, two workers that train, and the servers' ports."""
    with serving(folder, wait_s=wait_s) as (servers, ports), ExitStack() as stack:
        workers = []
        for index in range(2):
            workers.append(Worker(data, ports, index, mode, settings=settings))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.step()
        yield servers, workers, ports


def test_worker_killed_in_sync_leaves_nobody_waiting(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path, "sync") as (servers, workers, _):
        workers[1].process.send_signal(signal.SIGKILL)
        log = workers[0].wait()
        codes = [server.wait() for server in servers]

    assert workers[0].process.returncode == 8
    assert "[1]" in log.splitlines()[-1]
    assert codes == [12, 12]


def test_worker_killed_in_async_leaves_the_other_training(data: Path, tmp_path: Path) -> None:
    with running(data, tmp_path, "async") as (_, workers, _):
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
    with running(data, tmp_path, mode, settings=["cluster.retry_s=5"]) as (servers, workers, _):
        servers[0].process.kill()
        logs = [worker.wait() for worker in workers]

    # The first to notice tells the other one, by the server that is left.
    codes = {worker.process.returncode for worker in workers}
    assert codes == {4} or codes == {4, 12}, logs
    for log in logs:
        assert "127.0.0.1:" in log.splitlines()[-1]
        assert "Traceback" not in log


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_worker_told_to_stop_ends_the_other_with_its_reason(
    mode: str, data: Path, tmp_path: Path
) -> None:
    with running(data, tmp_path, mode) as (_, workers, _):
        workers[1].process.terminate()
        logs = [worker.wait() for worker in workers]

    assert [worker.process.returncode for worker in workers] == [12, 143], logs
    assert "worker 1 aborted the job: it was told to stop (SIGTERM)" in logs[0].splitlines()[-1]
    assert "Traceback" not in logs[0] + logs[1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_worker_that_was_restarted_is_refused(mode: str, data: Path, tmp_path: Path) -> None:
    """It would train from the start again, and the other one without it: a mixture of two runs."""
    # The job must not end for want of the killed one before the other has started.
    patient = [f"cluster.lease_s={LIMIT_S}"]
    with (
        running(data, tmp_path, mode, wait_s=LIMIT_S, settings=patient) as (_, workers, ports),
        ExitStack() as stack,
    ):
        workers[1].process.kill()
        again = Worker(data, ports, 1, mode, settings=patient)
        stack.callback(again.close)
        log = again.wait()

    assert again.process.returncode == 10
    assert "another process joined as worker 1 before" in log.splitlines()[-1]


@pytest.mark.parametrize("wrong", [1, 3])
def test_wrong_number_of_workers_in_one_of_them_ends_all(
    wrong: int, data: Path, tmp_path: Path
) -> None:
    with serving(tmp_path) as (_, ports), ExitStack() as stack:
        index = min(1, wrong - 1)
        workers = [
            Worker(data, ports, 1 - index, "sync"),
            Worker(data, ports, index, "sync", num_workers=wrong),
        ]
        for worker in workers:
            stack.callback(worker.close)
        logs = [worker.wait() for worker in workers]

    assert [worker.process.returncode for worker in workers] == [12, 2], logs
    for log in logs:
        assert (
            f"PADDLE_TRAINERS_NUM = {wrong} (the server has PADDLE_TRAINERS_NUM = 2)"
            in log.splitlines()[-1]
        )


def test_worker_whose_files_are_missing_ends_the_job_before_it_joins(
    data: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, wait_s=LIMIT_S) as (_, ports), ExitStack() as stack:
        missing = [f"data.train={tmp_path}/none/*"]
        workers = [
            Worker(data, ports, 0, "sync"),
            Worker(data, ports, 1, "sync", settings=missing),
        ]
        for worker in workers:
            stack.callback(worker.close)
        logs = [worker.wait() for worker in workers]

    assert [worker.process.returncode for worker in workers] == [12, 6], logs
    assert "worker 1 aborted the job: DataError: " in logs[0].splitlines()[-1]
    assert "no file matches" in logs[0].splitlines()[-1]
    assert logs[1].splitlines()[-1].startswith("error: ")
