"""Servers come and go while real processes train, and are killed: the model stays that of a calm run.

CTR_PS_RANDOM_RUNS is the number of runs with moves and kills at random.
"""

import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_recovery import LIMIT_S, figures, saving
from tests.support.commands import COMMANDS, clean_environment, generated, run
from tests.support.running_job import RunningJob, training
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANDOM_RUNS = int(os.environ.get("CTR_PS_RANDOM_RUNS", "1"))
EPOCHS = "6"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=20_000, test_rows=2_000, files=2)


def settings(data: Path, folder: Path) -> dict[str, str]:
    return {**saving(data, folder), "train.epochs": EPOCHS}


@pytest.fixture(scope="module")
def calm(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calm")
    with RunningJob(folder, training(settings(data, folder))) as job:
        return figures(job)


def finished(job: RunningJob) -> dict[str, Any]:
    """Waits for the end of a job some of whose servers were drained, and returns its figures."""
    codes = job.wait(*job.workers)
    assert set(codes.values()) == {0}, f"{codes}\n{job.tails}"
    result = job.result()
    return {name: result[name] for name in ("model_digest", "auc", "log_loss", "examples")}


def moved(job: RunningJob, *command: object) -> str:
    told = []
    for _ in range(3):  # a move that waits too long for processes that were killed is ended
        process = job.cluster(*command)
        output, _ = process.communicate(timeout=LIMIT_S)
        if process.returncode == 0:
            return output
        told.append(output)
    raise AssertionError(f"{command}: {told}\n{job.tails}")


def test_servers_that_come_and_go_leave_the_model_of_a_calm_run(
    data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        assert "calls waited" in moved(job, "add", job.start_spare())
        job.restart("server.2")
        job.restart("worker.1")
        moved(job, "drain", 1)
        assert job.wait("server.1", limit_s=LIMIT_S) == {"server.1": 0}
        job.restart("server.0")
        job.restart("worker.0")
        moved(job, "replace", 2, job.start_spare())
        assert "2 servers" in moved(job, "status")
        assert finished(job) == calm


@pytest.mark.parametrize("seed", range(RANDOM_RUNS))
def test_moves_and_kills_at_random_leave_the_model_of_a_calm_run(
    seed: int, data: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    chance = random.Random(seed)
    happened: list[str] = []
    with RunningJob(tmp_path, training(settings(data, tmp_path))) as job:
        job.wait_for_steps()
        in_map = {0: "server.0", 1: "server.1"}
        for _ in range(5):
            others = [index for index in in_map if index]
            kinds = ["add"] if not others else ["add", "drain", "replace"]
            kind = chance.choice(kinds if len(in_map) < 4 else ["drain", "replace"])
            command: list[object] = [kind]
            if kind != "add":
                command.append(chance.choice(others))
            if kind != "drain":
                command.append(job.start_spare())
            process = job.cluster(*command)
            time.sleep(chance.uniform(0, 2.0))
            victim = chance.choice([*in_map.values(), *job.workers, job.servers[-1], "driver"])
            if not job.is_running("worker.0"):
                process.kill()
                break
            if victim == "driver":
                process.kill()
            else:
                job.restart(victim)
            output, _ = process.communicate(timeout=LIMIT_S)
            happened.append(f"{command}: kill {victim}: {process.returncode} {output[-300:]}")
            if not job.is_running("worker.0"):
                break
            in_map = _map_of(job, in_map)
        assert finished(job) == calm, "\n".join(happened)


def _map_of(job: RunningJob, before: dict[int, str]) -> dict[int, str]:
    process = job.cluster("status")
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:  # the job has ended meanwhile
        return before
    names = dict(zip(job.endpoints, job.servers, strict=True))
    found = re.findall(r"^server (\d+)  (\S+)", output, re.MULTILINE)
    return {int(index): names[endpoint] for index, endpoint in found}


def test_a_spare_of_the_launcher_is_added(data: Path, tmp_path: Path) -> None:
    environment = {**clean_environment(), "CTR_PS_TOKEN": "a-token-of-this-test"}
    job, log = training(settings(data, tmp_path))[2:], tmp_path / "log"
    options = ["--server-num=1", "--worker-num=2", "--spare-num=1", f"--log-dir={log}"]
    options += ["--durability=log", "--max-restarts=1"]
    with (tmp_path / "err").open("wb") as error:
        launch = subprocess.Popen(
            [str(COMMANDS / "ps-launch"), *options, *map(str, job)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=error,
        )
    try:
        found: list[re.Match[str]] = []

        def trains() -> bool:
            said = re.search(
                r"servers (\S+), workers: 2, spares (\S+),", (tmp_path / "err").read_text()
            )
            worker = log / "trainer.0.log"
            if said is None or not worker.exists() or " step=" not in worker.read_text():
                return False
            found.append(said)
            return True

        wait_until(trains, LIMIT_S)
        server, spare = found[0].groups()
        done = run("ps-cluster", server, "add", spare, environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert launch.wait(LIMIT_S) == 0, (tmp_path / "err").read_text()[-3000:]
        assert "worker 0 left" in (log / "spare.0.log").read_text()
    finally:
        launch.kill()
        launch.wait()
