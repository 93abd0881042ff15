"""A cluster of processes that SIGKILL ends at once, and the same command again."""

import re
import subprocess
from pathlib import Path

import pytest

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.support.commands import COMMANDS, ROOT, clean_environment, generated, result_of
from tests.support.processes import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=20_000, test_rows=2_000, files=2)


def arguments(data: Path, folder: Path, num_servers: int = 2) -> list[str]:
    settings = {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "checkpoint.dir": str(folder),
        "checkpoint.every_steps": "10",
        "checkpoint.keep_last": "2",
        "checkpoint.resume": "true",
        "model.hidden": "[16]",
        "train.batch_size": "64",
        "train.epochs": "2",
        "strategy": "{mode='sync'}",
    }
    return [
        f"--server-num={num_servers}",
        "--worker-num=2",
        f"--log-dir={folder}.log",
        str(ROOT / "examples/ctr_dnn.toml"),
        *(f"--set={key}={value}" for key, value in settings.items()),
    ]


def kill_once_saved(data: Path, folder: Path, step: int) -> int:
    """Kills a cluster when it has saved after so many steps; returns the version that it leaves.

    The launcher is killed, and with it the system kills all that it started.
    """
    command = [COMMANDS / "ps-launch", *arguments(data, folder)]
    with started(command, clean_environment()) as launcher:
        while saved_step(launcher) < step:
            pass
        launcher.kill()
        launcher.communicate(timeout=LIMIT_S)  # its children hold the pipes
    return version_of(folder)


def saved_step(launcher: subprocess.Popen[str]) -> int:
    """Reads the log of worker 0 up to the next checkpoint, and returns the step that names it."""
    assert launcher.stderr is not None
    while (
        told := re.search(r"saved checkpoint=.*/step-(\d+) ", line := launcher.stderr.readline())
    ) is None:
        assert line, "the run ended before it was killed"
    return int(told[1])


def version_of(folder: Path) -> int:
    return Checkpoint.open(folder).manifest.version


def test_killed_cluster_started_again_ends_with_the_same_bytes(data: Path, tmp_path: Path) -> None:
    whole = result_of("ps-launch", *arguments(data, tmp_path / "whole"))

    reached = [kill_once_saved(data, tmp_path / "killed", step) for step in (20, 170)]
    ended = result_of("ps-launch", *arguments(data, tmp_path / "killed", num_servers=3))

    assert reached[0] < reached[1] < version_of(tmp_path / "killed")
    assert 0 < ended["examples"] < whole["examples"]
    for figure in ("model_digest", "auc", "log_loss"):
        assert ended[figure] == whole[figure]
