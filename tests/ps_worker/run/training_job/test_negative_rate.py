"""Jobs that train on a share of the negatives: what they learn, and what their evaluation shows."""

from pathlib import Path

import pytest

from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.run.plan import plan_of
from tests.support.training import train_alone, written_module

TEST_ROWS = 300_000
"""Of which 22 % are clicked: calibration has a statistical error of 0.35 %. Of 60,000 it is 0.8 %."""


def job_of(folder: Path, *settings: str) -> Job:
    paths = [
        f"data.train={folder}/train/*",
        f"data.test={folder}/test/*",
        f"data.schema={folder}/schema.toml",
    ]
    return override_job({}, [*paths, "train.batch_size=512", *settings], source="test")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lr", "ctr_dnn"])
def test_a_tenth_of_the_negatives_gives_calibrated_predictions(planted: Path, model: str) -> None:
    """One pass over 1.5 M rows with rates that decay: constant ones leave 3 % to chance (docs/data.md)."""
    settings = [
        f"model.name={model}",
        "data.negative_rate=0.1",
        "optimizer.schedule={kind='linear', total_steps=875}",
    ]
    summary = train_alone(job_of(planted, *settings)).as_json()

    assert summary["calibration"] == pytest.approx(1.0, abs=0.02)
    assert summary["test_examples"] == TEST_ROWS


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    generate(folder, rows=1_500_000, test_rows=TEST_ROWS, files=4, test_files=1, seed=1)
    return folder


@pytest.mark.parametrize("correction", ["logit", "weight"])
def test_uncorrected_odds_would_be_ten_times_too_high(tmp_path: Path, correction: str) -> None:
    """A few rows are enough to tell them: the predicted clicks are near the actual ones, not above twice."""
    generate(tmp_path, rows=20_000, test_rows=4_000, files=1, test_files=1, seed=1)
    settings = ["model.name=lr", "data.negative_rate=0.1", f"data.negative_correction={correction}"]
    if correction == "logit":
        settings.pop()  # the default

    summary = train_alone(job_of(tmp_path, *settings)).as_json()

    assert 0.7 < summary["calibration"] < 1.4
    assert 5_500 < summary["examples"] < 6_800
    assert summary["test_examples"] == 4_000


def test_model_with_a_loss_of_its_own_is_told_to_use_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    methods = (
        "    def loss(self, batch, output):\n"
        "        return (output - batch.labels) ** 2\n"
        "    def probabilities(self, batch, output):\n"
        "        return output.sigmoid()\n"
    )
    generate(tmp_path, rows=100, test_rows=100, files=1, test_files=1, seed=1)
    settings = [f"model.name={written_module(tmp_path, methods)}", "data.negative_rate=0.5"]

    with pytest.raises(JobError, match=r"set data\.negative_correction = 'weight'"):
        plan_of(job_of(tmp_path, *settings))
    plan_of(job_of(tmp_path, *settings, "data.negative_correction=weight"))
