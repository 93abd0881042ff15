"""Checkpoints to be served, and rows to predict."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ctr_ps.ps_worker.data.user_code.samples import Sample
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from tests.support.training import job_of, train_alone

NUM_EPOCHS = 21


@dataclass(frozen=True)
class Trained:
    """Checkpoints epoch-1, epoch-2 and so on of one run, and its test rows."""

    folder: Path
    samples: Sequence[Sample]

    def publish(self, epoch: int, folder: Path) -> None:
        """Makes a checkpoint the newest of a folder as a trainer does: it is named when it is there."""
        name = f"epoch-{epoch}"
        shutil.copytree(self.folder / name, folder / name)
        (folder / "next").write_text(f"{name}\n")
        (folder / "next").rename(folder / "LATEST")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    data = folder / "data"
    generate(data, rows=500, test_rows=100, files=1, test_files=1, seed=1)
    settings = [
        "model.name=fm",
        f"data.train={data}/train/*",
        f"checkpoint.dir={folder}/model",
        f"checkpoint.keep_last={NUM_EPOCHS}",
        f"train.epochs={NUM_EPOCHS}",
        "train.batch_size=100",
    ]
    train_alone(job_of(*settings))
    (path,) = sorted((data / "test").iterdir())
    lines = [line.split("\t") for line in path.read_text(encoding="ascii").splitlines()]
    samples = [
        (None, [float(number) if number else None for number in line[1:14]], line[14:])
        for line in lines
    ]
    return Trained(folder / "model", samples)
