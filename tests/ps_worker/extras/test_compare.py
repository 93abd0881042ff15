"""Several models on the same rows: figures of each, and how sure their differences are."""

import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from ctr_ps.protos.errors import DataError, JobError, UsageError
from ctr_ps.ps_worker.extras import compare as module
from ctr_ps.ps_worker.extras.compare import compare, replicates
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import load_job
from tests.support.training import job_of, train_alone

N = 400


def rows(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, weights and predictions, many of them equal."""
    random = np.random.default_rng(seed)
    rate = random.random(N)
    labels = (random.random(N) < rate).astype(np.float32)
    weights = random.integers(0, 4, N).astype(np.float32)
    return labels, weights, np.round(rate * 0.8 + 0.1, 1).astype(np.float32)


def test_figures_of_all_examples_are_those_of_sklearn() -> None:
    labels, weights, predictions = rows(1)
    certain = labels.copy()

    found = replicates(labels, weights, [predictions, certain])[0]

    assert found[0] == pytest.approx(
        [
            log_loss(labels, predictions.astype(float), sample_weight=weights),
            roc_auc_score(labels, predictions, sample_weight=weights),
        ]
    )
    assert found[1] == pytest.approx([-math.log(1 - 1e-7), 1.0], rel=1e-6)


def test_error_of_a_mean_is_what_the_central_limit_says() -> None:
    labels, _, predictions = rows(2)
    ones = np.ones(N, np.float32)
    shifted = np.clip(predictions + 0.02, 0, 1).astype(np.float32)

    found = replicates(labels, ones, [predictions, shifted])[1:, :, 0]

    loss, other = (
        -np.log(np.where(labels > 0, each, 1 - each)).astype(float)
        for each in (predictions, shifted)
    )
    expected = [each.std() / math.sqrt(N) for each in (loss, other, loss - other)]
    errors = [each.std() for each in (*found.T, found[:, 0] - found[:, 1])]
    assert errors == pytest.approx(expected, rel=0.2)  # of 200 samples: 5 % is a standard error
    assert errors[2] < errors[0] / 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generate(tmp_path, rows=600, test_rows=200, files=1, test_files=1, seed=1)
    settings = f"""
[model]
name = "deepfm"
dim = 3
hidden = [4]
[data]
train = "{tmp_path}/train/*"
test = "{tmp_path}/test/*"
[train]
batch_size = 50
[checkpoint]
dir = "{tmp_path}/model"
[run]
dir = "{tmp_path}/run"
"""
    (tmp_path / "job.toml").write_text(settings)
    return tmp_path


def test_each_model_is_trained_as_its_job_says(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted(folder.rglob("*"))

    found = compare([folder / "job.toml"], ["lr", "deepfm"], ["train.epochs=2"])

    assert sorted(folder.rglob("*")) == before
    assert "no checkpoint" not in caplog.text
    assert [each["model"] for each in found["models"]] == ["lr", "deepfm", "base rate"]
    common = [
        f"data.train={folder}/train/*",
        f"data.test={folder}/test/*",
        "train.batch_size=50",
        "train.epochs=2",
    ]
    deepfm = ["model.name=deepfm", "model.dim=3", "model.hidden=[4]"]
    alone = [train_alone(job_of(*common, *own)) for own in (["model.name=lr"], deepfm)]
    for row, summary in zip(found["models"], alone, strict=False):
        assert row["log_loss"] == pytest.approx(summary.log_loss)
        assert row["auc"] == pytest.approx(summary.auc, abs=1e-4)
        assert row["log_loss_error"] > row["log_loss_to_best_error"] >= 0
    lr, mlp, base = found["models"]
    assert base["log_loss"] == pytest.approx(alone[0].base_log_loss)
    assert (base["auc"], base["auc_error"]) == (0.5, 0)
    assert min(lr["log_loss_to_best"], mlp["log_loss_to_best"]) == 0
    assert mlp["log_loss"] - lr["log_loss"] == pytest.approx(
        mlp["log_loss_to_best"] - lr["log_loss_to_best"]
    )
    # A weight and a vector of 3 for each row, or only the weight.
    assert (lr["parameters"] - 14) * 4 < mlp["parameters"]
    assert (found["rows"], found["click_rate"]) == (200, pytest.approx(base_rate(folder)))


def base_rate(folder: Path) -> float:
    (test,) = (folder / "test").iterdir()
    return np.mean([line.startswith("1") for line in test.read_text().splitlines()])


@pytest.mark.slow
def test_jobs_are_compared_by_their_best_models(folder: Path) -> None:
    """Of data.valid where there is no data.test."""
    text = (folder / "job.toml").read_text().replace("test = ", "valid = ")
    text = text.replace("[train]", "[train]\nepochs = 3") + '[valid]\nfinal_model = "best"\n'
    text += "[optimizer.sparse]\nname = 'adagrad'\nlearning_rate = 0.5\n"
    (folder / "last.toml").write_text(text.replace('"best"', '"last"'))
    (folder / "best.toml").write_text(text)

    found = compare([folder / "last.toml", folder / "best.toml"])

    last, best, _ = found["models"]
    assert (last["model"], best["model"]) == tuple(
        f"{folder / name}.toml deepfm" for name in ("last", "best")
    )
    trained = train_alone(load_job(folder / "best.toml", [f"data.test={folder}/test/*"]))
    assert trained.best is not None
    assert trained.best["epoch"] < 3
    assert best["log_loss"] == pytest.approx(trained.log_loss)
    assert last["log_loss"] == pytest.approx(trained.validations[-1]["log_loss"])


@pytest.mark.parametrize(
    ("models", "overrides", "message"),
    [
        (["lr", "deepf"], [], "did you mean 'deepfm'"),
        (["lr"], ["data.test=[]"], r"data\.test is empty"),
        (["lr"], ["model.dim='x'"], "dim"),
        (["no.py:Model"], [], r"no file 'no\.py'"),
    ],
)
def test_nothing_is_trained_if_a_model_is_wrong(
    models: list[str], overrides: list[str], message: str, folder: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "train_job", None)

    with pytest.raises(JobError, match=message):
        compare([folder / "job.toml"], [*models, "deepfm"], overrides)


def test_other_rows_cannot_be_compared(folder: Path) -> None:
    (test,) = (folder / "test").iterdir()
    lines = test.read_text().splitlines(keepends=True)
    (folder / "less.tsv").write_text("".join(lines[:-1]))
    text = (folder / "job.toml").read_text().replace("test/*", "less.tsv")
    (folder / "less.toml").write_text(text)

    message = r"less\.toml lr was evaluated on other rows than .*job\.toml"
    with pytest.raises(UsageError, match=message):
        compare([folder / "job.toml", folder / "less.toml"], ["lr"])


def test_rows_without_weight_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(
        'hash_version = 1\nweight = "w"\nslots = ["site"]\ndense = []\n'
    )
    for name, weight in (("train", 1), ("test", 0)):
        (tmp_path / f"{name}.csv").write_text(f"label,site,w\n1,a,{weight}\n0,b,{weight}\n")
    (tmp_path / "job.toml").write_text('model = "lr"')
    data = [f"data.{name}={tmp_path}/{name}.csv" for name in ("train", "test")]

    with pytest.raises(DataError, match="no rows with a label"):
        compare([tmp_path / "job.toml"], [], [*data, f"data.schema={tmp_path}/schema.toml"])
