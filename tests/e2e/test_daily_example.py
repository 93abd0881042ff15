"""examples/daily.sh: days of clicks, one after another."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.support.commands import (
    COMMANDS,
    LIMIT_S,
    ROOT,
    clean_environment,
    generated,
    result_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOB = ROOT / "examples/daily.toml"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return generated(tmp_path / "data", rows=9000, test_rows=2000, files=3, seed=3)


def learn(models: Path, *days: Path) -> str:
    """Runs the script with files as days, and returns what it printed."""
    path = f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "examples/daily.sh", *days],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        cwd=models.parent,
        env={**clean_environment(), "PATH": path, "MODELS": str(models), "SERVERS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_of(model: Path) -> dict[str, int]:
    checkpoint = Checkpoint.open(model)
    return {
        name: sum(rows.keys.size for _, rows in checkpoint.read_shards(name, range(64)))
        for name in checkpoint.tables
    }


def test_days_are_learnt_one_after_another_and_old_keys_go(data: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    first, second, third = sorted((data / "train").iterdir())
    learn(models, first)
    before = rows_of(models / "part-000")

    assert "nothing is left to train: epochs=1" in learn(models, first)
    log = learn(models, first, second)  # a finished day is not learnt again

    assert f"== part-001, from {models}/part-000" in log
    header, *days = [
        line.split() for line in log.splitlines() if line.startswith(("day ", "part-0"))
    ]
    assert header == ["day", "examples", "log", "loss", "base", "rate", "AUC", "calibration"]
    assert days[0] == ["part-000", *"-----"]
    day, examples, log_loss, base, auc, calibration = days[1]
    rate = np.mean([line.startswith("1") for line in second.read_text().splitlines()])
    assert (day, examples) == ("part-001", "3000")
    assert float(base) == pytest.approx(
        -rate * np.log(rate) - (1 - rate) * np.log(1 - rate), abs=1e-4
    )
    assert float(log_loss) < 1.1 * float(base)
    assert 0.55 < float(auc) < 0.85
    assert 0.8 < float(calibration) < 1.25
    after = rows_of(models / "part-001")
    assert after["linear"] > before["linear"]  # the first day is still there
    assert after["embedding"] < after["linear"] / 2

    expiring = result_of(
        "ps-worker", "train", JOB, f"--set=data.train={third}", f"--set=data.test={data}/test/*",
        f"--set=checkpoint.load={models}/part-001", f"--set=checkpoint.dir={models}/part-002",
        "--set=life.delete_threshold=0.25", "--set=train.batch_size=64",
    )  # fmt: skip

    tables = expiring["tables"]
    assert tables["linear"]["expired"] > 0
    assert tables["embedding"]["expired"] == 0
    assert rows_of(models / "part-002") == {name: tables[name]["rows"] for name in tables}
    assert expiring["auc"] > 0.55
