"""The example scripts, alone and as clusters of real processes."""

import sys
from pathlib import Path

import pytest

from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.support.commands import ROOT, generated, result_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CTR_DNN = ROOT / "examples/ctr_dnn.py"
WIDE_AND_DEEP = ROOT / "examples/wide_and_deep.py"
ALONE = Path(sys.executable).name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated(tmp_path_factory.mktemp("data"), rows=8000, test_rows=2000, files=4, seed=3)


def files_of(data: Path) -> list[str]:
    return [f"--train-files={data}/train/part-*", f"--test-files={data}/test/part-*"]


def output_of(script: Path, *arguments: object, folder: Path, workers: int = 0) -> str:
    """Runs a script, alone or with 2 servers, and returns the last line that it prints."""
    sizes = ["--server-num", 2, "--worker-num", workers, "--log-dir", folder / "log"]
    launch = ["ps-launch", *sizes] if workers else [ALONE]
    done = run(launch[0], *launch[1:], script, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def figures_of(line: str) -> dict[str, float]:
    words = line.removeprefix("test ").split()
    return {name: float(x) for name, x in zip(words[::2], words[1::2], strict=True)}


@pytest.fixture(scope="module")
def two_passes(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A script that trained twice on all rows in sync: the folder of its checkpoints, and its last line."""
    folder = tmp_path_factory.mktemp("two")
    options = ["--distributed", "--mode", "sync", "--epochs", 2, "--output", folder / "out"]
    return folder / "out", output_of(CTR_DNN, *options, *files_of(data), folder=folder, workers=2)


def test_script_learns_in_sync_what_a_job_learns(
    data: Path, two_passes: tuple[Path, str], tmp_path: Path
) -> None:
    output, line = two_passes

    job = result_of(
        "ps-launch", "--server-num", 1, "--worker-num", 2, "--log-dir", tmp_path / "job",
        ROOT / "examples/ctr_dnn.toml", f"--set=data.train={data}/train/part-*",
        f"--set=data.test={data}/test/part-*", "--set=strategy.mode=sync",
        "--set=train.epochs=2",
    )  # fmt: skip

    inferred = result_of(
        "ps-worker", "infer", "--model", output / "epoch-2", "--data", f"{data}/test/part-*"
    )
    assert inferred["model_digest"] == job["model_digest"]
    assert line == f"test examples 2000 auc {job['auc']:.6f} log_loss {job['log_loss']:.6f}"
    # Batches of another size, so other roundings.
    assert inferred["auc"] == pytest.approx(job["auc"], abs=1e-5)


def test_script_goes_on_from_what_it_saved(
    data: Path, two_passes: tuple[Path, str], tmp_path: Path
) -> None:
    """Two runs of one pass are one run of two, whatever becomes of the servers between them."""
    output, expected = two_passes
    again = ["--mode", "sync", "--output", "again", "--load", output / "epoch-1"]

    found = output_of(CTR_DNN, *again, *files_of(data), folder=tmp_path, workers=2)

    assert found == expected


def test_ctr_dnn_learns_alone(data: Path, tmp_path: Path) -> None:
    options = ["--print-period", 0.5, *files_of(data)]

    figures = figures_of(output_of(CTR_DNN, *options, folder=tmp_path))

    assert figures["examples"] == 2000
    assert figures["auc"] > 0.65


@pytest.mark.parametrize("how", ["alone", "async", "sync"])
def test_wide_and_deep_reports_the_metrics_of_all_workers(
    how: str, data: Path, tmp_path: Path
) -> None:
    options = [*files_of(data), *(["--sync"] if how == "sync" else [])]
    workers = 0 if how == "alone" else 2

    figures = figures_of(output_of(WIDE_AND_DEEP, *options, folder=tmp_path, workers=workers))

    assert list(figures) == ["examples", "auc", "acc", "mae", "mse", "rmse"]
    assert figures["examples"] == 2000
    assert figures["auc"] > 0.65
    assert figures["rmse"] ** 2 == pytest.approx(figures["mse"], rel=1e-4)
    assert figures["mse"] < figures["mae"] < 0.5
    assert 0.5 < figures["acc"] < 1


def test_script_that_insists_on_a_cluster_refuses_to_train_alone(tmp_path: Path) -> None:
    done = run(ALONE, CTR_DNN, "--distributed", cwd=tmp_path)

    assert done.returncode == 1
    assert "start it with ps-launch" in done.stderr


def test_ctr_dnn_learns_real_clicks_asynchronously(criteo_sample: Path, tmp_path: Path) -> None:
    options = [
        "--print-period=0.5",
        f"--train-files={criteo_sample}/part-[0-4].tsv.gz",
        f"--test-files={criteo_sample}/part-5.tsv.gz",
    ]

    figures = figures_of(output_of(CTR_DNN, *options, folder=tmp_path, workers=2))

    print(figures)
    assert figures["examples"] == 10_000
    assert figures["auc"] >= 0.69
    assert figures["log_loss"] < 0.134  # the base rate alone gives 0.1396


def test_static_program_learns(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    script = ROOT / "examples/paddle_wide_deep.py"

    last = output_of(script, f"{data}/train/part-*", folder=tmp_path, workers=2)

    assert figures_of(last)["AUC"] > 0.58  # after 63 steps of each worker
    saved = Checkpoint.open(tmp_path / "output/paddle_wide_deep")
    assert list(saved.tables) == ["embedding"]
