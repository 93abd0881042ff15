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


def tsv_with_a_header(folder: Path) -> Written:
    columns = {"clicked": LABELS, "user": ids(20, 900), "price": RNG.random(ROWS)}
    pd.DataFrame(columns).to_csv(folder / "rows.tsv", sep="\t", index=False)
    return [str(folder / "rows.tsv"), "--format", "csv"], {"slots": ["user"], "dense": ["price"]}


def deepctr_criteo(folder: Path) -> Written:
    numbers = {f"I{i}": RNG.integers(0, 50 * i, ROWS).astype(float) for i in range(1, 14)}
    values = {f"C{i}": [f"{each:08x}" for each in ids(3 + i, 2**28)] for i in range(1, 27)}
    frame = pd.DataFrame({"label": LABELS, **numbers, **values})
    frame.loc[::7, "I1"] = None
    frame.to_csv(folder / "criteo_sample.txt", index=False)
    return [str(folder / "criteo_sample.txt"), "--format", "csv"], {
        "slots": [*values],
        "dense": [*numbers],
    }


def fuxictr_sequences(folder: Path) -> Written:
    frame = pd.DataFrame(
        {
            "clk": LABELS,
            "userid": ids(30),
            "click_sequence": ["^".join(map(str, ids(40)[: 1 + row % 4])) for row in range(ROWS)],
        }
    )
    frame.to_csv(folder / "train.csv", index=False)
    return [str(folder / "train.csv")], {
        "slots": ["userid", "click_sequence"],
        "split": {"click_sequence": "^"},
    }


def fuxictr_embeddings(folder: Path) -> Written:
    embeddings = RNG.random((ROWS, 4)).round(3).tolist()
    frame = pd.DataFrame({"click": LABELS, "item_id": ids(20), "image_emb": embeddings})
    frame.to_parquet(folder / "train.parquet")
    return [str(folder / "train.parquet")], {
        "slots": ["item_id"],
        "dense": [f"image_emb[{index}]" for index in range(4)],
    }


def deepctr_avazu(folder: Path) -> Written:
    columns = {
        "id": [f"{10**19 + row}" for row in range(ROWS)],
        "click": LABELS,
        "hour": [14102100 + row // 30 for row in range(ROWS)],
        "C1": [1005 + 5 * each for each in ids(2)],
        "banner_pos": ids(2),
        "site_id": [f"{each:08x}" for each in ids(9, 2**27)],
        "C14": ids(8, 15704),
    }
    pd.DataFrame(columns).to_csv(folder / "avazu_sample.txt", index=False)
    slots = ["C1", "banner_pos", "site_id", "C14"]
    return [str(folder / "avazu_sample.txt"), "--format", "csv"], {"slots": slots, "dense": []}


def rechub_avazu(folder: Path) -> Written:
    columns = {f"feat_{i}": ids(4 + i, 1_543_495 * i) for i in range(1, 6)}
    pd.DataFrame({"label": LABELS, **columns}).to_csv(folder / "avazu.csv", index=False)
    return [str(folder / "avazu.csv"), "--slots", "feat_*"], {"slots": [*columns], "dense": []}


def rechub_ali_ccp(folder: Path) -> Written:
    columns = {name: ids(6, 1) for name in ("101", "205", "508")}
    numbers = {"D109_14": RNG.random(ROWS)}
    labels = {"click": LABELS, "purchase": LABELS * RNG.integers(0, 2, ROWS)}
    frame = pd.DataFrame({**labels, **columns, **numbers})
    frame.to_csv(folder / "ali_ccp_train_sample.csv", index=False)
    return [str(folder / "ali_ccp_train_sample.csv")], {"slots": [*columns], "dense": [*numbers]}


@pytest.mark.parametrize(
    "write",
    [
        json_lines,
        feather,
        tsv_with_a_header,
        deepctr_criteo,
        fuxictr_sequences,
        fuxictr_embeddings,
        deepctr_avazu,
        rechub_avazu,
        rechub_ali_ccp,
    ],
)
def test_files_train_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Written]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = write(tmp_path)
    Path("schema.toml").write_text("an earlier one", encoding="utf-8")

    made = CliRunner().invoke(data, ["init", *arguments, "--overwrite"])
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
