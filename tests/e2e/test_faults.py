"""Runs of `ps-launch` with faults end with the model of one without."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import call_faults
from tests.support.process_faults import Fault, launched_with

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
JOB = """
[data]
train = "data/train/part-*"
[train]
batch_size = 64
[model]
name = "ctr_dnn"
[optimizer]
sparse = { name = "adagrad", learning_rate = 0.05 }
dense = { name = "adam", learning_rate = 0.001 }
[strategy]
mode = "sync"
[checkpoint]
dir = "output"
every_steps = 10
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    generate = [COMMANDS / "ps-data", "generate", "data", "--rows", "20000", "--files", "4"]
    subprocess.run(generate, check=True, capture_output=True)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def result_of(job: Path, faults: Sequence[Fault], *options: str) -> dict[str, Any]:
    sizes = ("--server-num", 2, "--worker-num", 2)
    return launched_with(faults, Path("log"), *sizes, *options, job)


def test_faults_of_processes_and_calls_leave_the_model_as_it_is(job: Path) -> None:
    """A paused worker, a server that is killed, and pushes that are lost, late and sent twice."""
    faults = [Fault(20, "TRAINER", 0, pause_s=0.5), Fault(40, "PSERVER", 1)]
    worker = f"{sys.executable} -P {call_faults.__file__} journal train"

    plain = result_of(job, [], "--set", "checkpoint.dir=plain", "--set", "cluster.stream=false")
    disturbed = result_of(job, faults, "--max-restarts", "1", "--worker-command", worker)

    assert disturbed["model_digest"] == plain["model_digest"]
    assert disturbed["restarts"] == 1
    happened = set(Path("journal").read_text().splitlines())
    every = {f"{each} PushPull" for each in ("request_lost", "reply_lost", "twice", "delayed")}
    assert every <= happened


def test_job_that_continues_ends_without_a_killed_worker(job: Path) -> None:
    settings = ["cluster.on_worker_loss=continue", "cluster.lease_s=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    restarts = ["--max-restarts", "1", "--durability", "log"]

    result = result_of(job, [Fault(25, "TRAINER", 1)], *options, *restarts)

    assert result["lost_workers"] == [1]
    assert result["restarts"] == 0
