"""The example of a module of PyTorch, through the commands that a user runs.

Those of one process run in this one, which has imported PyTorch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ps_worker.cli import app as ps_worker  # noqa: E402
from ctr_ps.ps_worker.extras.data_tools.generate import generate  # noqa: E402
from ctr_ps.ps_worker.predict import Predictor  # noqa: E402
from tests.support.commands import ROOT, result_here, result_of  # noqa: E402

pytestmark = pytest.mark.timeout(200)

JOB = ROOT / "examples/torch_wide_deep.toml"
SAME = ("auc", "log_loss", "model_digest")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clicks of a known model with AUC 0.82."""
    folder = tmp_path_factory.mktemp("data")
    generate(folder, rows=8000, test_rows=1000, files=2, test_files=2, seed=1)
    return folder


def settings(data: Path, folder: Path, **others: str) -> list[object]:
    own = {
        "data.train": f"{data}/train/part-*",
        "data.test": f"{data}/test/part-*",
        "model.hidden": "[16]",
        "checkpoint.dir": str(folder),
        "checkpoint.mode": "delta",
        "strategy.mode": "sync",
        **{name.replace("__", "."): value for name, value in others.items()},
    }
    return [f"--set={name}={value}" for name, value in own.items()]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model of two epochs, the second of them in a run that was resumed, and what that said of it."""
    folder = tmp_path_factory.mktemp("model")
    for epochs in ("1", "2"):
        own = settings(data, folder, train__epochs=epochs, checkpoint__resume="true")
        result = result_here(ps_worker, "train", JOB, *own)
    return folder, result


def figures(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in SAME}


def test_it_learns(trained: tuple[Path, dict[str, Any]]) -> None:
    assert trained[1]["auc"] > 0.7


def test_inference_agrees_with_the_evaluation_that_ended_training(
    trained: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    folder, result = trained

    inferred = result_here(
        ps_worker, "infer", "--model", folder, "--data", f"{data}/test/part-*",
        "--output", tmp_path / "predictions.txt", "--allow-code",
    )  # fmt: skip

    assert figures(inferred) == figures(result)
    assert np.loadtxt(tmp_path / "predictions.txt").shape == (1000,)


@pytest.mark.slow
def test_cluster_that_is_not_resumed_trains_the_same_model(
    trained: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    """One worker, so that both see the same batches."""
    launched = result_of(
        "ps-launch", "--server-num", "2", "--worker-num", "1", JOB,
        *settings(data, tmp_path, train__epochs="2"),
    )  # fmt: skip

    assert figures(launched) == figures(trained[1])


def test_exported_program_predicts_what_the_predictor_predicts(
    trained: tuple[Path, dict[str, Any]], data: Path, tmp_path: Path
) -> None:
    folder, result = trained
    program = tmp_path / "model.pt2"

    done = result_here(ps_worker, "export", "--model", folder, "--output", program, "--allow-code")

    assert done["model_digest"] == result["model_digest"]
    assert done["inputs"]["deep:0"] == ["batch", 26, 10]
    predictor = Predictor.load(folder, allow_code=True)
    samples = [(None, [n] * 13, [f"v{n}"] * 26) for n in range(5)]
    inputs = predictor.program_inputs(samples)
    assert list(inputs) == list(done["inputs"])
    found = torch.export.load(program).module()(*map(torch.from_numpy, inputs.values()))
    np.testing.assert_allclose(
        found.detach().numpy(), predictor.predict_samples(samples), rtol=1e-5
    )
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
