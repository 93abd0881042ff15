"""Jobs whose clicks come after their impressions: what they learn, and that all predictions agree."""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.models.summed import LogisticRegression
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.data.streams import stream_data
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.trainer import Trainer
from tests.support.streams import MemorySource
from tests.support.training import train_alone, written_module

SLOTS = ("site", "item", "user")
VALUES = 20

Rows = tuple[np.ndarray, np.ndarray]
"""Values int64[N, 3] of the slots, and clicks bool[N]."""


def impressions(number: int, seed: int) -> Rows:
    """Returns impressions with a click rate of about a fourth, planted in the values of the slots."""
    effects = np.random.default_rng(7).normal(0, 0.6, (len(SLOTS), VALUES))
    rng = np.random.default_rng(seed)
    values = rng.integers(0, VALUES, (number, len(SLOTS)))
    logits = effects[np.arange(len(SLOTS)), values].sum(1) - 1.3
    return values, rng.random(number) < 1 / (1 + np.exp(-logits))


def as_they_arrive(rows: Rows, mean_delay: float, seed: int) -> tuple[np.ndarray, Rows]:
    """Returns the rows of a stream with their times, one impression per unit of time.

    Each impression is a row without a click, and each click one more after an exponential delay; those after
    the last impression have not arrived yet.
    """
    values, clicks = rows
    times = np.arange(len(clicks), dtype=np.float64)
    late = times + np.random.default_rng(seed).exponential(mean_delay, len(clicks))
    has_come = clicks & (late < len(clicks))
    at = np.concatenate([times, late[has_come]])
    order = np.argsort(at, kind="stable")
    seen = np.concatenate([values, values[has_come]])[order]
    labels = np.concatenate([np.zeros(len(clicks), bool), np.ones(has_come.sum(), bool)])[order]
    return at[order], (seen, labels)


def write(path: Path, rows: Rows) -> None:
    lines = [
        f"{int(click)},s{site},i{item},u{user}"
        for (site, item, user), click in zip(*rows, strict=True)
    ]
    path.write_text("\n".join(["click,site,item,user", *lines, ""]))


def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delay")
    (folder / "schema.toml").write_text(
        f'hash_version = 1\nlabel = "click"\nslots = {list(SLOTS)}\ndense = []\n'
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_folder(tmp_path_factory)


def job_of(folder: Path, train: str, *settings: str) -> Job:
    paths = [f"data.train={folder}/{train}.csv", f"data.test={folder}/test.csv"]
    own = [f"data.schema={folder}/schema.toml", "model.name=lr", "train.batch_size=256"]
    return override_job({}, [*own, *paths, *settings], source="test")


def normalized_entropy(job: Job) -> float:
    summary = train_alone(job).as_json()
    return float(summary["log_loss"] / summary["base_log_loss"])


@pytest.fixture(scope="module")
def clicks(folder: Path) -> tuple[np.ndarray, Rows]:
    """Rows as they arrive of 200,000 impressions, with a mean delay of 2 % of the run; and files of them."""
    rows = impressions(200_000, seed=1)
    at, arriving = as_they_arrive(rows, mean_delay=4000, seed=3)
    write(folder / "final.csv", rows)
    write(folder / "arriving.csv", arriving)
    write(folder / "test.csv", impressions(100_000, seed=2))
    return at, arriving


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lr", "ctr_dnn"])
def test_models_of_rows_as_they_arrive_are_as_good_as_of_final_labels(
    folder: Path, clicks: Any, model: str
) -> None:
    """Normalized entropies: the loss of a row, divided by that of predicting the click rate."""
    hidden = ["model.hidden=[32,16]"] if model == "ctr_dnn" else []

    def of(train: str, *settings: str) -> float:
        decay = "optimizer.schedule={kind='linear', total_steps=930}"
        job = job_of(folder, train, f"model.name={model}", *hidden, decay, *settings)
        return normalized_entropy(job)

    oracle = of("final")
    sampled = ("data.negative_rate=0.3", "data.negative_correction")

    assert oracle == pytest.approx(0.9, abs=0.005)
    assert of("arriving") > oracle + 0.015
    assert of("arriving", "train.delay=fnw") < oracle + 0.002
    assert of("arriving", "train.delay=fnw", sampled[0]) < oracle + 0.003
    assert of("arriving", "train.delay=fnw", sampled[0], f"{sampled[1]}=weight") < oracle + 0.003
    # The odds of lr are products, which planted ones are not, but not its b / (1 - b).
    assert of("arriving", "train.delay=fnc") < oracle + (0.005 if model == "lr" else 0.002)


@pytest.mark.slow
def test_a_stream_teaches_what_a_file_does(
    folder: Path, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, (values, labels) = clicks
    lines = [
        json.dumps(
            {"click": int(click), "site": f"s{site}", "item": f"i{item}", "user": f"u{user}"}
        )
        for (site, item, user), click in zip(values, labels, strict=True)
    ]
    messages = [
        (int(at[first]), "\n".join(lines[first : first + 50]).encode())
        for first in range(0, len(lines), 50)
    ]
    new = partial(MemorySource, {"clicks/0": messages}, Random(0))
    monkeypatch.setattr(stream_data, "open_source", lambda _: new())
    stream = ("data.train=[]", "data.stream='kafka://broker:9092/clicks?end=latest'")

    of_file = normalized_entropy(job_of(folder, "arriving", "train.delay=fnw"))
    of_stream = normalized_entropy(job_of(folder, "arriving", "train.delay=fnw", *stream))

    assert of_stream == pytest.approx(of_file, abs=0.0005)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = new_folder(tmp_path_factory)
    for name, seed in (("few", 4), ("test", 5)):
        write(folder / f"{name}.csv", impressions(2_000, seed))
    return folder


def test_all_predictions_have_the_calibration(few: Path, tmp_path: Path) -> None:
    """Those of a saved model, in Python, by a command and in an evaluation: b / (1 - b)."""
    saved = f"checkpoint.dir={tmp_path}/model"
    summary = train_alone(job_of(few, "few", "train.delay=fnc", saved)).as_json()
    test = str(few / "test.csv")

    uncorrected = Path(tmp_path / "rates")
    infer(f"{tmp_path}/model", [test], output=uncorrected, overrides=["train.delay=none"])
    figures = infer(f"{tmp_path}/model", [test], output=tmp_path / "clicks")
    predicted = Predictor.load(tmp_path / "model").predict(test)

    rates = np.loadtxt(uncorrected)
    assert 0.05 < rates.min() < rates.max() < 0.5
    np.testing.assert_allclose(predicted, rates / (1 - rates), rtol=1e-4)
    np.testing.assert_allclose(np.loadtxt(tmp_path / "clicks"), predicted, rtol=1e-4)
    labels = impressions(2_000, 5)[1]
    assert summary["calibration"] == pytest.approx(predicted.sum() / labels.sum(), rel=1e-4)
    assert figures["calibration"] == pytest.approx(summary["calibration"], rel=1e-6)


def test_a_trainer_corrects_and_saves_a_model_that_is_given(few: Path, tmp_path: Path) -> None:
    schema = Schema.load(few / "schema.toml")
    test = str(few / "test.csv")
    trainers = [
        Trainer(LogisticRegression(schema), train={"delay": delay}, data={"format": "csv"})
        for delay in ("none", "fnc")
    ]
    for trainer in trainers:
        trainer.train(str(few / "few.csv"))
    rates, clicks = (trainer.predict(test) for trainer in trainers)

    np.testing.assert_allclose(clicks, rates / (1 - rates), rtol=1e-4)
    trainers[1].save(tmp_path / "model")
    assert (Predictor.load(tmp_path / "model").predict(test) == clicks).all()


def test_a_start_from_a_model_of_another_correction_is_told_and_a_resume_refused(
    few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_alone(job_of(few, "few", "train.delay=fnc", f"checkpoint.dir={tmp_path}/model"))
    caplog.clear()

    train_alone(job_of(few, "few", f"checkpoint.load={tmp_path}/model"))

    told = [text for text in caplog.messages if 'train.delay = "none", was "fnc"' in text]
    assert [text.partition(" ")[0] for text in told] == ["starting"]
    resume = [f"checkpoint.dir={tmp_path}/model", "checkpoint.resume=true", "train.epochs=2"]
    fault = r"train\.delay: it is 'none', but was 'fnc' in the run in .*: write 'fnc'; or"
    with pytest.raises(JobError, match=fault):
        train_alone(job_of(few, "few", *resume))


def test_workers_agree_on_the_correction(few: Path) -> None:
    assert plan_of(job_of(few, "few", "train.delay=fnw")).terms["train.delay"] == "fnw"


@pytest.mark.parametrize(
    ("forward", "delay", "fault"),
    [
        (
            "loss",
            "fnw",
            "several labels or its own loss, but 'fnw' needs the log loss of one click",
        ),
        ("probabilities", "fnc", "its own probabilities, which 'fnc' cannot correct: set 'fnw'"),
    ],
)
def test_model_of_another_loss_is_refused(
    few: Path, tmp_path: Path, forward: str, delay: str, fault: str
) -> None:
    pytest.importorskip("torch")
    methods = f"    def {forward}(self, batch, output):\n        return output.sigmoid()\n"
    settings = [f"model.name={written_module(tmp_path, methods)}", f"train.delay={delay}"]

    with pytest.raises(JobError, match=f"^--set train.delay={delay}: train.delay: Net has {fault}"):
        plan_of(job_of(few, "few", *settings))
