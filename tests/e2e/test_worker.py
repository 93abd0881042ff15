"""`ps-worker` alone: training on from a checkpoint, inference, and what it says about bad input.

It trains in processes; of what comes before and after, most runs in this one.
"""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_worker.cli import app as ps_worker
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from tests.support.commands import (
    COMMANDS,
    ROOT,
    clean_environment,
    invoked,
    result_here,
    result_of,
    run,
)
from tests.support.processes import started

pytestmark = pytest.mark.timeout(200)

LIMIT_S = 60.0
JOB = ROOT / "examples/ctr_dnn.toml"
SMALL = ["--set=model.hidden=[16]", "--set=train.batch_size=32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=2000, test_rows=500, files=2, test_files=2, seed=3)
    return folder


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("model")
    trained = result_of("ps-worker", "train", *job(data), f"--set=checkpoint.dir={folder}")
    return folder, trained


def job(data: Path) -> list[object]:
    return [
        JOB,
        *SMALL,
        f"--set=data.train={data}/train/part-*",
        f"--set=data.test={data}/test/part-*",
    ]


def test_training_reports_what_scripts_read(model: tuple[Path, dict]) -> None:
    _, trained = model

    assert {"auc", "log_loss", "examples", "examples_per_s", "model_digest"} <= trained.keys()
    assert trained["examples"] == 2000
    assert (len(trained["model_digest"]), trained["test_examples"]) == (64, 500)


def test_dry_run_takes_a_step_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    settings = [f"--set=checkpoint.dir={tmp_path}/model", f"--set=run.dir={tmp_path}/run"]

    found = result_here(ps_worker, "train", *job(data), *settings, "--dry-run")
    printed = run("ps-launch", "--worker-num=2", "--dry-run", *job(data), *settings)

    assert printed.returncode == 0, printed.stderr
    assert found["rows_of_batch"] == 32
    assert f"{found['loss']:.5g}" in printed.stdout
    assert list(tmp_path.iterdir()) == []


def test_inference_agrees_with_the_evaluation_that_ended_training(
    model: tuple[Path, dict], data: Path, tmp_path: Path
) -> None:
    folder, trained = model

    inferred = result_of(
        "ps-worker", "infer", "--model", folder, "--data", f"{data}/test/part-*",
        "--output", tmp_path / "predictions.txt", "--set", "strategy.mode=sync",
    )  # fmt: skip

    predictions = np.loadtxt(tmp_path / "predictions.txt")
    assert {name: inferred[name] for name in ("auc", "log_loss", "model_digest")} == {
        name: trained[name] for name in ("auc", "log_loss", "model_digest")
    }
    assert predictions.shape == (500,)
    assert ((predictions > 0) & (predictions < 1)).all()


def test_importance_is_of_each_feature(model: tuple[Path, dict]) -> None:
    folder, trained = model

    found = result_here(ps_worker, "importance", "--model", folder, "--rows=500")

    assert (found["examples"], found["auc"]) == (500, trained["auc"])
    assert len(found["features"]) == 13 + 26
    lost = [each["auc_lost"] for each in found["features"]]
    assert lost == sorted(lost, reverse=True)


def test_training_goes_on_from_a_checkpoint(model: tuple[Path, dict], data: Path) -> None:
    """At another learning rate."""
    folder, trained = model

    further = result_here(
        ps_worker, "train", *job(data), f"--set=checkpoint.load={folder}",
        "--set=optimizer.sparse.learning_rate=0.001",
    )  # fmt: skip

    assert further["train_loss"] < trained["train_loss"]
    assert further["model_digest"] != trained["model_digest"]


def test_damaged_checkpoint_is_refused_by_name(
    model: tuple[Path, dict], data: Path, tmp_path: Path
) -> None:
    folder, _ = model
    shutil.copytree(folder, tmp_path / "model")
    table = next((tmp_path / "model").glob("epoch-1/data-*/table.*.arrow"))
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)

    infer = invoked(ps_worker, "infer", "--model", tmp_path / "model", "--data", f"{data}/test/*")
    train = invoked(ps_worker, "train", *job(data), f"--set=checkpoint.load={tmp_path}/model")

    for done in (infer, train):
        assert done.exit_code == 5
        assert "embedding" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["data.schema=none.toml"], 2, "--set data.schema=none.toml: data.schema: "),
        (["data.train=[]"], 2, "--set data.train=[]: data.train is empty"),
        (
            ["data.train=nowhere/*"],
            6,
            "--set data.train=nowhere/*: data.train: no file matches 'nowhere/*'",
        ),
        (["checkpoint.load=nowhere"], 5, "nowhere"),
        (["checkpoint.dir=/proc/none"], 5, "/proc/none"),
    ],
)
def test_mistake_in_the_job_has_its_exit_code(
    overrides: list[str], code: int, message: str, data: Path
) -> None:
    done = invoked(ps_worker, "train", *job(data), *(f"--set={text}" for text in overrides))

    assert done.exit_code == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_environment_is_a_usage_error(data: Path) -> None:
    done = invoked(ps_worker, "train", *job(data), environment={"TRAINING_ROLE": "TRAINER"})

    assert done.exit_code == 2
    assert "PADDLE_TRAINERS_NUM is not set" in done.stderr


def test_training_alone_ends_by_sigterm_with_143(data: Path) -> None:
    endless = ["--set=train.epochs=1000000", "--set=train.log_every_s=0.1"]
    command = [COMMANDS / "ps-worker", "train", *job(data), *endless]

    with started(command, clean_environment()) as worker:
        assert worker.stderr is not None
        while " step=" not in (line := worker.stderr.readline()):
            assert line, "the worker ended while it should have trained"
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=LIMIT_S)

    assert worker.returncode == 143
