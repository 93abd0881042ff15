"""The first steps of a fresh model: in no mode does the default job unlearn what a constant knows.

Rows in Criteo's layout: 26 slots, most of whose examples have one of a few values, so that nearly every batch
moves the same rows, and what several workers learnt from the same old rows adds up.
"""

from pathlib import Path
from typing import Any

import pytest

from ps_worker.data.tools.generate import generate
from tests.support.commands import ROOT, result_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_GAP = 0.005
WORSE_THAN_A_CONSTANT = 0.53


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    generate(folder, rows=40_000, test_rows=10_000, files=4, test_files=1, seed=1)
    return folder


def first_pass_of_daily(rows: Path, folder: Path, workers: int, *settings: str) -> dict[str, Any]:
    """Trains examples/daily.toml on one day of clicks, and returns the figures of the pass."""
    result = result_of(
        "ps-launch",
        *("--server-num", 2, "--worker-num", workers, "--log-dir", folder / "log"),
        ROOT / "examples/daily.toml",
        f"--set=data.train={rows}/train/part-*",
        f"--set=data.test={rows}/test/part-*",
        f"--set=checkpoint.dir={folder}/models",
        "--set=checkpoint.resume=false",
        *(f"--set={setting}" for setting in settings),
    )
    (figures,) = result["passes"]
    assert figures["examples"] == 40_000
    print(workers, settings, figures["log_loss"], result["log_loss"], result["staleness"])
    return {"pass": figures["log_loss"], "test": result["log_loss"]}


@pytest.fixture(scope="module")
def sync(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return first_pass_of_daily(rows, tmp_path_factory.mktemp("sync"), 2, "strategy.mode=sync")


@pytest.mark.parametrize("mode", ["async", "bounded_staleness", "half_async"])
def test_first_pass_learns_what_sync_learns(
    mode: str, rows: Path, sync: dict[str, Any], tmp_path: Path
) -> None:
    found = first_pass_of_daily(rows, tmp_path, 2, f"strategy.mode={mode}")

    assert found["pass"] <= sync["pass"] + MAX_GAP
    assert found["test"] <= sync["test"] + MAX_GAP


def test_more_workers_are_no_worse_than_a_constant(rows: Path, tmp_path: Path) -> None:
    found = first_pass_of_daily(rows, tmp_path, 4)

    assert found["pass"] < WORSE_THAN_A_CONSTANT - 0.04
