"""`ps-data init`, then `ps-worker train`, on files that nobody has prepared, without an edit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, orc
from typer.testing import CliRunner, Result

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.cli import app as worker
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.extras.data_tools.cli import app as data

runner = CliRunner()


def invoke(app: Any, *arguments: object) -> Result:
    return runner.invoke(app, [*map(str, arguments)])


def clicks(rows: int, seed: int) -> dict[str, Any]:
    """Returns columns of which user, tags and price decide about clicks, others say nothing."""
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(0)
    weights = {"user": truth.normal(size=60), "tag": truth.normal(size=30)}
    users, price = rng.integers(0, 60, rows), rng.exponential(40.0, rows)
    tags = [rng.choice(30, rng.integers(0, 4), replace=False) for _ in range(rows)]
    logits = weights["user"][users] * 1.5 + np.array([weights["tag"][each].sum() for each in tags])
    logits += 0.8 * (np.log1p(price) - 3.2) - 0.5
    labels = rng.random(rows) < 1 / (1 + np.exp(-logits))
    return {
        "request": [f"r{seed}-{number:06d}" for number in range(rows)],
        "user": users,
        "tags": tags,
        "price": np.where(rng.random(rows) < 0.1, np.nan, price),
        "label": labels,
        "seconds": rng.integers(1_600_000_000, 1_700_000_000, rows),
    }


def parquet_with_lists(folder: Path) -> tuple[list[str], list[str]]:
    for part in range(3):
        columns = clicks(1500, part)
        table = pa.table(
            {
                "request id": columns["request"],
                "user": pa.array([f"u{user}" for user in columns["user"]]).dictionary_encode(),
                "tags": pa.array([each.tolist() for each in columns["tags"]], pa.list_(pa.int32())),
                "price": pa.array(columns["price"], from_pandas=True),
                "is_click": pa.array(columns["label"]),
                "shown at": pa.array(columns["seconds"], pa.timestamp("s")),
                "device": pa.array([{"os": "linux"}] * len(columns["user"])),
                "empty": pa.nulls(len(columns["user"])),
            }
        )
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=500)
    return [f"{folder}/part-*.parquet"], []


def csv_with_strings(folder: Path) -> tuple[list[str], list[str]]:
    for part, rows in ((0, 4000), (1, 1000)):
        columns = clicks(rows, part)
        prices = [None if np.isnan(price) else f"{price:.2f}" for price in columns["price"]]
        table = pa.table(
            {
                "request": columns["request"],
                'the "user", by name': [f"user {user}" for user in columns["user"]],
                "tags.joined": ["|".join(f"tag {tag}" for tag in each) for each in columns["tags"]],
                "prix en €": prices,
                "slots": ["a", "b"] * (rows // 2),
                "clicked": columns["label"].astype(int).astype(str),
                "time": [f"2026-01-0{1 + number % 9} 10:00" for number in range(rows)],
            }
        )
        csv.write_csv(table, folder / f"day-{part}.csv")
    return [f"{folder}/day-0.csv"], ["--test", f"{folder}/day-1.csv"]


def orc_of_numbers(folder: Path) -> tuple[list[str], list[str]]:
    for part in range(4):
        columns = clicks(1200, part)
        order = np.argsort(columns["label"], kind="stable")  # all clicks at the end
        table = pa.table(
            {
                "row": pa.array(range(part * 1200, part * 1200 + 1200)),
                "user": pa.array(columns["user"].astype(np.int16) - 30),
                "tag_ids": pa.array(
                    [each.tolist() for each in columns["tags"]], pa.list_(pa.int64())
                ),
                "price": pa.array(
                    [None if np.isnan(p) else p for p in columns["price"]], pa.float64()
                ).cast(pa.decimal128(12, 2), safe=False),
                "outcome": pa.array(columns["label"].astype(np.float64)),
                "seen_at": pa.array(columns["seconds"]),
                "raw": pa.array(np.where(columns["user"] == 3, np.inf, 1.5)),
            }
        ).take(order)
        orc.write_table(table, str(folder / f"{part}.orc"), stripe_size=1024)
    return [f"{folder}/*.orc"], ["--label", "outcome"]


@pytest.mark.parametrize("make", [parquet_with_lists, csv_with_strings, orc_of_numbers])
def test_job_that_nobody_edited_learns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], tuple[list[str], list[str]]],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    patterns, options = make(Path("data"))

    made = invoke(data, "init", *patterns, *options)
    assert made.exit_code == 0, made.output
    has_lists = make is not csv_with_strings
    assert (
        "is in order of time: docs/models.md#histories on `din`" in Path("job.toml").read_text()
    ) == has_lists
    trained = invoke(worker, "train", "job.toml", "--json")

    assert trained.exit_code == 0, trained.output
    summary = json.loads(trained.stdout.splitlines()[-1])
    assert summary["auc"] > 0.65, summary


def test_slot_text_is_recognised_and_its_numbers_are_vectors_slots_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in range(2):
        lines = [
            f"click:{row % 3 // 2} dense_feature:{row / 7} dense_feature:{row % 4} price:{row / 2} "
            f"1:{row * 7919 % 100} 2:{row % 11} {'words:5 words:6' if row == 299 else f'words:{row % 5}'}"
            for row in range(part, 300)
        ]
        Path(f"part-{part}").write_text("".join(f"{line}\n" for line in lines))

    made = invoke(data, "init", "part-*")

    assert made.exit_code == 0, made.output
    schema = Schema.load("schema.toml")
    assert schema.label == "click"
    assert schema.slots == ("1", "2", "words")
    assert [column.name for column in schema.dense] == [
        "price",
        *("dense_feature[0]", "dense_feature[1]"),
    ]
    assert 'format = "paddlerec"' in Path("job.toml").read_text()
    assert "after the first 1,000 of a file have are not here" in Path("schema.toml").read_text()
    counted = invoke(data, "profile", "part-1", "--schema", "schema.toml").output
    assert counted.startswith("299 rows, click rate 0.3344, 0 malformed rows\n")
    unnamed = QueueDataset(schema, 64)
    unnamed.set_filelist(["part-1"])
    with pytest.raises(DataError, match="first line has words of name:value: --format paddlerec"):
        list(unnamed)


def test_columns_that_may_be_further_labels_are_written_as_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        f"{row % 2},{row % 5 // 4},{row % 3},u{row % 7},{row % 11 // 10}" for row in range(200)
    ]
    Path("a.csv").write_text("\n".join(["click,purchase,order,user,is_paid", *lines, ""]))

    assert invoke(data, "init", "a.csv").exit_code == 0

    text = Path("schema.toml").read_text()
    labels = 'labels = ["click", "purchase", "is_paid"]'
    comment = f"# In the place of label, for models esmm and mmoe: {labels}"
    assert comment in text.splitlines()
    Path("several.toml").write_text(text.replace('label = "click"', labels))
    assert Schema.load("several.toml").labels == ("click", "purchase", "is_paid")


def test_ratings_are_a_label_with_a_least_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{row % 5 + 1},u{row % 7},{row % 9}" for row in range(200)]
    Path("a.csv").write_text("\n".join(["rating,user,movie_id", *lines, ""]))

    refused = invoke(data, "init", "a.csv", "--label", "rating")
    made = invoke(data, "init", "a.csv", "--label", "rating >= 4")

    assert "which --label 'rating >= N' makes of numbers" in str(refused.exception)
    assert made.exit_code == 0, made.output
    schema = Schema.load("schema.toml")
    assert (schema.label, schema.features) == ("rating >= 4", ("user", "movie_id"))
    counted = invoke(data, "profile", "a.csv", "--schema", "schema.toml").output
    assert counted.startswith("200 rows, click rate 0.4000, 0 malformed rows\n")
