"""Checkpoints to be served, rows to predict, and requests for the first rows as JSON and for gRPC."""

import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.v1 import open_inference_pb2 as messages
from ctr_ps.ps_worker.data.user_code.samples import Sample
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from tests.support.training import job_of, train_alone

NUM_EPOCHS = 21
NUM_ROWS = 5


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


@pytest.fixture
def folder(trained: Trained, tmp_path: Path) -> Path:
    """A folder to serve, with the first checkpoint."""
    folder = tmp_path / "served"
    folder.mkdir()
    trained.publish(1, folder)
    return folder


def columns(trained: Trained, num_rows: int = NUM_ROWS) -> list[tuple[str, list[Any]]]:
    """Returns the columns of the first rows, by the names of Criteo's."""
    rows = trained.samples[:num_rows]
    numbers = [(f"I{i + 1}", [row[1][i] for row in rows]) for i in range(13)]
    values = [(f"C{i + 1}", [row[2][i] for row in rows]) for i in range(26)]
    return numbers + values


def json_request(trained: Trained, num_rows: int = NUM_ROWS) -> dict[str, Any]:
    inputs = [
        {
            "name": name,
            "datatype": "FP32" if name[0] == "I" else "BYTES",
            "shape": [num_rows],
            "data": values,
        }
        for name, values in columns(trained, num_rows)
    ]
    return {"id": "42", "inputs": inputs}


def grpc_request(trained: Trained) -> Any:
    request = messages.ModelInferRequest(model_name="ctr", id="42")
    for name, values in columns(trained):
        datatype = "FP32" if name[0] == "I" else "BYTES"
        request.inputs.add(name=name, datatype=datatype, shape=[NUM_ROWS])
        if datatype == "FP32":
            raw = np.array(
                [np.nan if value is None else value for value in values], "<f4"
            ).tobytes()
        else:
            texts = [value.encode() for value in values]
            raw = b"".join(struct.pack("<I", len(text)) + text for text in texts)
        request.raw_input_contents.append(raw)
    return request
