"""Files as others write them: `ps-data init`, then `ps-worker train`, without an edit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.cli import app as worker
from ctr_ps.ps_worker.extras.data_tools.cli import app as data

ROWS = 120
RNG = np.random.default_rng(1)
LABELS = RNG.integers(0, 2, ROWS)

Written = tuple[
    list[str], dict[str, Any]
]  # arguments of init; slots, dense and so on of the schema


def ids(number: int, first: int = 0) -> list[int]:
    return (RNG.integers(0, number, ROWS) + first).tolist()


def logs() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "click": LABELS,
            "user": [f"u{each}" for each in ids(20)],
            "device": [{"os": ["ios", "linux"][each], "age": each + 0.5} for each in ids(2)],
            "tags": [[f"t{each}"] * (1 + each % 2) for each in ids(5)],
        }
    )


LOGS = {"slots": ["user", "device.os", "tags"], "dense": ["device.age"]}


def json_lines(folder: Path) -> Written:
    logs().to_json(folder / "rows.jsonl.gz", orient="records", lines=True)
    return [str(folder / "rows.jsonl.gz")], LOGS


def feather(folder: Path) -> Written:
    logs().to_feather(folder / "rows.feather")
    return [str(folder / "rows.feather")], LOGS


@pytest.mark.parametrize("write", [json_lines, feather])
def test_files_train_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Written]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = write(tmp_path)

    made = CliRunner().invoke(data, ["init", *arguments])
    assert made.exit_code == 0, made.output
    trained = CliRunner().invoke(worker, ["train", "job.toml", "--json"])

    assert trained.exit_code == 0, trained.output
    schema = Schema.load("schema.toml")
    found = {
        "slots": list(schema.slots),
        "dense": [each.name for each in schema.dense],
        "split": dict(schema.split),
        "labels": list(schema.labels),
    }
    assert {key: found[key] for key in expected} == expected, made.output
