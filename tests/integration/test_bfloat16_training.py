"""Training in bfloat16 learns what float32 learns; what it saves is float32, and served without PyTorch."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch import TorchModel
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.run.run import Run
from tests.support.commands import printed_by
from tests.support.torch_models import TWINS
from tests.support.training import (
    NUM_DENSE,
    NUM_SLOTS,
    job,
    random_batches,
    worker_run,
)

SCHEMA = Schema.numbered(NUM_DENSE, NUM_SLOTS)
OPTIONS = {"dim": 8, "hidden": [32, 16]}
SETTINGS = ("model={name='ctr_dnn', dim=8, hidden=[32, 16]}", "optimizer.sparse=adagrad")
TRAIN = random_batches(150, 64, seed=1)  # planted: clicks follow the first slot
TEST = random_batches(40, 256, seed=2)


def model_of(kind: str) -> Model:
    if kind == "torch":
        return TorchModel(SCHEMA, TWINS["ctr_dnn"], OPTIONS)
    return build_model(kind, SCHEMA, OPTIONS)


def trained(kind: str, compute: str, *overrides: str, store: ParameterStore | None = None) -> Run:
    settings = job("sync", *SETTINGS, f"train.compute={compute}", *overrides)
    run = worker_run(store or ParameterStore(), model_of(kind), settings)
    run.train(TRAIN)
    return run


@pytest.mark.parametrize("kind", ["ctr_dnn", "torch"])
def test_bfloat16_learns_what_float32_learns(kind: str) -> None:
    runs = [trained(kind, compute) for compute in ("float32", "bfloat16")]

    aucs = [run.evaluate(TEST).auc() for run in runs]

    for run in runs:
        run.close()
    assert runs[0].store.digest() != runs[1].store.digest()
    assert aucs[0] > 0.85  # a tenth of the clicks is noise
    assert abs(aucs[1] - aucs[0]) < 0.001


@pytest.mark.parametrize("kind", ["ctr_dnn", "torch"])
def test_steps_of_several_threads_in_bfloat16_are_repeatable(kind: str) -> None:
    digests = set()
    for _ in range(2):
        with trained(kind, "bfloat16", "train.thread_num=2") as run:
            digests.add(run.store.digest())

    assert len(digests) == 1


SERVE = """
import sys
sys.modules["torch"] = None  # as where it is not installed
import numpy as np
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.support.training import random_batches
print(Predictor.load(sys.argv[1]).predict(random_batches(1, 64, seed=2)[0]).tobytes().hex())
"""


def test_model_is_served_in_float32_and_without_pytorch(tmp_path: Path) -> None:
    url = str(tmp_path / "model")
    predictions: list[np.ndarray] = []
    (batch,) = random_batches(1, 64, seed=2)
    with trained("ctr_dnn", "bfloat16") as run:
        settings = job("sync", *SETTINGS, "train.compute=bfloat16")
        run.save(SaveRequest(url=url, attachments=attachments_of(settings, SCHEMA)))
        run.evaluate([batch], on_predictions=lambda each: predictions.append(each.copy()))

    assert printed_by(SERVE, url).strip() == predictions[0].tobytes().hex()
    assert Predictor.load(url).predict(batch).tobytes() == predictions[0].tobytes()
