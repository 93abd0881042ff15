"""A job file with tables on a device, here the CPU, through the commands that a user runs."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from tests.support.commands import COMMANDS, ROOT, clean_environment, generated, result_of, run
from tests.support.processes import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = ROOT / "examples/torch_wide_deep.toml"
DEVICE = {"device.tables": "pass", "device.kind": "cpu", "device.pass_rows": "1000"}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=4000, test_rows=1000, files=2)


def settings(data: Path, folder: Path, **others: str) -> list[str]:
    own = {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "data.in_memory": "true",
        "data.shuffle": "local",
        "model.hidden": "[16]",
        "train.batch_size": "100",
        "train.epochs": "2",
        "checkpoint.dir": str(folder),
        "strategy": "{mode='sync'}",
        **{name.replace("__", "."): value for name, value in others.items()},
    }
    return [f"--set={name}={value}" for name, value in own.items()]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, result_of("ps-worker", "train", JOB, *settings(data, folder, **DEVICE))


def test_it_learns_what_training_on_the_host_learns(
    trained: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    host = result_of("ps-worker", "train", JOB, *settings(data, tmp_path))

    for figure in ("auc", "log_loss", "train_loss"):
        assert trained[1][figure] == pytest.approx(host[figure], abs=1e-5)
    assert trained[1]["examples"] == host["examples"] == 8000
    assert {name: each["rows"] for name, each in trained[1]["tables"].items()} == {
        name: each["rows"] for name, each in host["tables"].items()
    }


def test_inference_agrees_with_the_evaluation_that_ended_training(
    trained: tuple[Path, dict[str, Any]], data: Path
) -> None:
    folder, result = trained

    inferred = result_of(
        "ps-worker", "infer", "--model", folder, "--data", f"{data}/test/part-*", "--allow-code"
    )

    assert inferred["auc"] == result["auc"]


def test_cluster_that_is_killed_in_a_pass_ends_with_the_same_bytes(
    trained: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    """Its checkpoint within an epoch is of the end of a pass, wherever it fell due."""
    others = {"checkpoint.every_steps": "13", "checkpoint.resume": "true"}
    launch = [
        "--server-num=2",
        "--worker-num=1",
        f"--log-dir={tmp_path}/log",
        str(JOB),
        *settings(data, tmp_path / "model", **DEVICE, **others),
    ]
    with started([COMMANDS / "ps-launch", *launch], clean_environment()) as launcher:
        assert launcher.stderr is not None
        while "saved checkpoint=" not in (line := launcher.stderr.readline()):
            assert line, "the run ended before it was killed"
        launcher.kill()
        launcher.communicate(timeout=LIMIT_S)  # its children hold the pipes

    ended = result_of("ps-launch", *launch)

    assert "step-20 " in line  # passes have 10 batches
    assert 0 < ended["examples"] < 8000
    for figure in ("model_digest", "auc"):
        assert ended[figure] == trained[1][figure]


def test_two_workers_are_refused(data: Path, tmp_path: Path) -> None:
    done = run(
        "ps-launch",
        "--server-num=1",
        "--worker-num=2",
        f"--log-dir={tmp_path}/log",
        JOB,
        *settings(data, tmp_path / "model", **DEVICE),
    )

    assert done.returncode == 2
    assert 'device.tables: is "pass", so one worker trains all rows' in done.stderr
