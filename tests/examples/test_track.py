"""examples/track.py sends all of a run, to the clients themselves where they are installed."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.ps_worker.extras.data_tools.generate import generate
from tests.support.commands import ROOT, clean_environment
from tests.support.training import job_of, train_alone

LIMIT_S = 100.0
SCRIPT = ROOT / "examples/track.py"


@pytest.fixture(scope="module")
def track() -> Any:
    spec = importlib.util.spec_from_file_location("track", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two passes, with a validation after each."""
    folder = tmp_path_factory.mktemp("track")
    generate(folder, rows=400, test_rows=100, files=1, test_files=1, seed=1)
    train_alone(
        job_of(
            f"data.train={folder}/train/*",
            f"data.valid={folder}/test/*",
            f"run.dir={folder}/run-1",
            f"checkpoint.dir={folder}/model",
            "train.epochs=2",
            "train.batch_size=50",
            "model.name=lr",
        )
    )
    return folder / "run-1"


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [each for each in lines if each["kind"] == kind]


class Sent:
    """A client that keeps what it is sent."""

    def __init__(self) -> None:
        self.started: list[tuple[str, Mapping[str, Any]]] = []
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.ended: list[tuple[bool, Mapping[str, Any]]] = []

    def start(self, name: str, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        self.started.append((name, settings))
        return (
            lambda numbers, step: self.numbers.append((step, dict(numbers))),
            lambda is_whole, result: self.ended.append((is_whole, result)),
        )


def test_settings_numbers_and_result_are_sent(
    track: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent()
    monkeypatch.setattr(track, "mlflow_run", sent.start)

    assert track.track(run, "mlflow", idle_limit_s=0.0)

    ((name, settings),) = sent.started
    assert name == "run-1"
    assert settings["train.epochs"] == 2
    assert settings["model.name"] == "lr"
    for kind in ("train", "pass", "valid"):
        of_kind = [(step, each) for step, each in sent.numbers if f"{kind}/auc" in each]
        assert [(step, each[f"{kind}/auc"]) for step, each in of_kind] == [
            (line["step"], line["auc"]) for line in lines_of(run, kind)
        ]
    (end,) = lines_of(run, "end")
    texts = {f"end/{key}": end[key] for key in ("model_digest", "checkpoint")}
    best = {"end/best/checkpoint": end["best"]["checkpoint"]}
    assert sent.ended == [(True, texts | best)]
    assert not any(name.endswith("/time") for _, each in sent.numbers for name in each)


def test_run_is_followed_while_it_writes_even_half_a_line(
    track: Any, run: Path, tmp_path: Path
) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines[0] + lines[1][:20])
    found, has_first, has_rest = [], threading.Event(), threading.Event()

    def write() -> None:
        assert has_first.wait(LIMIT_S)
        with path.open("ab") as file:
            file.write(lines[1][20:] + b"".join(lines[2:]))
        has_rest.set()

    writer = threading.Thread(target=write)
    writer.start()
    for record in track.records(path, idle_limit_s=LIMIT_S):
        found.append(record)
        has_first.set()
    writer.join()

    assert found == [json.loads(line) for line in lines]


def test_run_that_was_killed_is_sent_as_far_as_it_came(
    track: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:9])
    (tmp_path / "job.json").write_bytes((run / "job.json").read_bytes())
    sent = Sent()
    monkeypatch.setattr(track, "wandb_run", sent.start)

    assert not track.track(tmp_path, "wandb", idle_limit_s=0.05)

    assert len(sent.numbers) == 2
    assert sent.ended == [(False, {})]


@pytest.mark.slow
@pytest.mark.parametrize("client", ["mlflow", "wandb"])
def test_client_itself_takes_it(client: str, run: Path, tmp_path: Path) -> None:
    """In a folder, without a server."""
    pytest.importorskip(client, reason="not installed: pip install mlflow-skinny wandb")
    store = {
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
    }

    done = subprocess.run(
        [sys.executable, SCRIPT, run, "--to", client],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join(sys.path), **store},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    if client == "wandb":
        (log,) = tmp_path.rglob("run-*.wandb")
        assert b"valid/log_loss" in log.read_bytes()
        return
    (passes,) = tmp_path.glob("mlruns/*/*/metrics/pass/log_loss")
    told = [float(line.split()[1]) for line in passes.read_text().splitlines()]
    assert told == pytest.approx([line["log_loss"] for line in lines_of(run, "pass")])
    (epochs,) = tmp_path.glob("mlruns/*/*/params/train.epochs")
    assert epochs.read_text() == "2"
