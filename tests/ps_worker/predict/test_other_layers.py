"""A model whose code has its layers in another order than when it was saved is refused, not misread."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.predict.export import export
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.support.training import job_of, train_alone

MODEL = """
from torch import nn

from ctr_ps.ctr_model.torch import SlotEmbedding

class Net(nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.embedding = SlotEmbedding(dim=3)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, batch):
        return self.last(self.second(self.first(self.embedding(batch).sum(1)).relu()))
"""
LAYERS = ("        self.first = nn.Linear(3, 3)\n", "        self.second = nn.Linear(3, 3)\n")

Use = Callable[[Job, Path, Path], object]


_SECONDS = itertools.count(1_700_000_000)


def write(path: Path, code: str) -> None:
    """Writes a module's code, each time with a time of its own.

    Python takes what it compiled of a file for one of the same size and second.
    """
    path.write_text(code)
    second = next(_SECONDS)
    os.utime(path, (second, second))


def train_on(job: Job, *settings: str) -> None:
    """Trains a second epoch of the job, with these settings."""
    more = override_job(json.loads(job.to_json()), [*settings, "train.epochs=2"], source="test")
    train_alone(more)


USES: dict[str, Use] = {
    "predictor": lambda job, saved, tmp_path: Predictor.load(saved, allow_code=True),
    "infer": lambda job, saved, tmp_path: infer(str(saved), job.data.train, allow_code=True),
    "export": lambda job, saved, tmp_path: export(
        str(saved), tmp_path / "model.pt2", allow_code=True
    ),
    "warm start": lambda job, saved, tmp_path: train_on(
        job, f"checkpoint.load={saved}", f"checkpoint.dir={tmp_path}"
    ),
    "resume": lambda job, saved, tmp_path: train_on(job, "checkpoint.resume=true"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path, Path]:
    """A job, the file of its model, and its checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    generate(folder / "data", rows=100, test_rows=100, files=1, test_files=1, seed=1)
    path = folder / "net.py"
    write(path, MODEL)
    settings = [
        f"model.name={path}:Net",
        f"data.train={folder}/data/train/*",
        f"checkpoint.dir={folder}/saved",
        "train.batch_size=16",
    ]
    job = job_of(*settings)
    train_alone(job)
    return job, path, folder / "saved" / "epoch-1"


@pytest.mark.parametrize("use", USES)
def test_other_order_of_layers_is_refused(
    use: str, trained: tuple[Job, Path, Path], tmp_path: Path
) -> None:
    job, path, saved = trained
    write(path, MODEL.replace(LAYERS[0], "").replace(LAYERS[1], LAYERS[1] + LAYERS[0]))
    try:
        with pytest.raises(
            CheckpointError, match=r"with first.weight \[3, 3\], not second.weight \[3, 3\]"
        ):
            USES[use](job, saved, tmp_path)
    finally:
        write(path, MODEL)


def test_export_to_another_format_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(UsageError, match=r"^'out/model\.txt' does not end with \.onnx or \.pt2$"):
        export("no/such/model", Path("out/model.txt"))


@pytest.mark.parametrize("use", ["predictor", "infer"])
def test_the_code_that_was_trained_is_taken(
    use: str, trained: tuple[Job, Path, Path], tmp_path: Path
) -> None:
    job, _, saved = trained

    USES[use](job, saved, tmp_path)
