"""Runs that are disturbed by `ps-launch --chaos` end with the model of one that is not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import started

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
LIMIT_S = 240.0
JOB = """
[data]
train = "data/train/part-*"
[train]
batch_size = 128
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


def result_of(job: Path, *options: str) -> dict[str, Any]:
    command = [COMMANDS / "ps-launch", "--server-num", "2", "--worker-num", "2", "--json"]
    with started([*command, *options, job]) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_killed_server_and_a_paused_worker_leave_the_model_as_it_is(job: Path) -> None:
    chaos = "kill server 1 at step 25; pause worker 0 for 500ms at step 50; delay 1ms pushes"

    plain = result_of(job, "--set", "checkpoint.dir=plain", "--set", "cluster.stream=false")
    disturbed = result_of(job, "--max-restarts", "1", "--chaos", chaos)

    assert disturbed["model_digest"] == plain["model_digest"]
    assert disturbed["restarts"] == 1
    kill, pause = disturbed["chaos"]["processes"]
    assert (kill["process"], pause["process"]) == ("pserver.1", "trainer.0")
    assert kill["recovered_s"] is not None
    assert disturbed["chaos"]["calls"]["delayed"]["PushPull"] > 100


def test_job_that_continues_ends_without_a_killed_worker(job: Path) -> None:
    settings = ["cluster.on_worker_loss=continue", "cluster.lease_s=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    restarts = ["--max-restarts", "1", "--durability", "log"]

    result = result_of(job, *options, *restarts, "--chaos", "kill worker 1 at step 25")

    (kill,) = result["chaos"]["processes"]
    assert kill["is_done"]
    assert kill["recovered_s"] is not None
    assert result["restarts"] == 0
