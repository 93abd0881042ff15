"""Several labels from the schema to training, evaluation, inference and serving, on planted conversions."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyarrow import orc, parquet

from ctr_ps import Predictor, Trainer
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CtrPsError, DataError
from ctr_ps.ps_worker.data.in_memory_dataset import InMemoryDataset
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.predict.inference import infer
from tests.support.training import train_alone

VALUES, SLOTS = 30, 3
SCHEMA = Schema(dense=(), slots=("user", "item", "site"), label="click", other_labels=("bought",))


@dataclass(frozen=True)
class Planted:
    """Rows with their labels, and the probabilities that these were drawn by; each array [N]."""

    values: NDArray[np.int64]  # [N, SLOTS]
    click: NDArray[np.float32]
    bought: NDArray[np.float32]
    ctr: NDArray[np.float32]
    cvr: NDArray[np.float32]

    def table(self) -> pa.Table:
        columns = {"click": self.click.astype(np.int8), "bought": self.bought.astype(np.int8)}
        named = zip(SCHEMA.slots, self.values.T, strict=True)
        return pa.table(
            columns | {name: column.astype(str).astype(object) for name, column in named}
        )


def planted(num_rows: int, seed: int) -> Planted:
    """Draws rows; clicks and conversions depend on other effects of the same values."""
    effects = np.random.default_rng(0).normal(size=(2, SLOTS, VALUES))
    rng = np.random.default_rng(seed)
    values = rng.integers(0, VALUES, (num_rows, SLOTS))
    logits = effects[:, np.arange(SLOTS), values].sum(axis=2) + np.array([[-1.5], [-0.5]])
    ctr, cvr = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
    click = (rng.random(num_rows) < ctr).astype(np.float32)
    bought = click * (rng.random(num_rows) < cvr)
    return Planted(values, click, bought.astype(np.float32), ctr, cvr)


TRAIN, TEST = planted(40_000, seed=1), planted(10_000, seed=2)


def auc(labels: NDArray[np.float32], probabilities: NDArray[np.float32]) -> float:
    metrics = ClickMetrics()
    metrics.add(labels, np.ascontiguousarray(probabilities))
    return metrics.auc()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    parquet.write_table(TRAIN.table(), folder / "train.parquet")
    parquet.write_table(TEST.table(), folder / "test.parquet")
    (folder / "schema.toml").write_text(SCHEMA.to_toml())
    return folder


OWN = "tests/support/task_modules.py:SharedBottom"
OPTIONS = {
    "esmm": {"dim": 4, "hidden": [16]},
    "mmoe": {"dim": 4, "num_experts": 3, "expert": [16], "tower": [8]},
    OWN: {"dim": 4, "hidden": 16},
}
NAMES = {
    "esmm": ["click", "bought", "click_and_bought"],
    "mmoe": ["click", "bought"],
    OWN: ["click", "bought"],
}

every_model = pytest.mark.parametrize("name", OPTIONS)


def trained(name: str, data: Path, tmp_path: Path, *settings: str) -> dict[str, Any]:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    job = {
        "model": {"name": name, **OPTIONS[name]},
        "data": {
            "train": f"{data}/train.parquet",
            "test": f"{data}/test.parquet",
            "schema": f"{data}/schema.toml",
        },
        "checkpoint": {"dir": f"{tmp_path}/model"},
        "train": {"batch_size": 256, "epochs": 3},
        "optimizer": {
            "sparse": {"name": "adagrad", "learning_rate": 0.1},
            "dense": {"name": "adam", "learning_rate": 0.003},
        },
    }
    return train_alone(override_job(job, list(settings), source="test")).as_json()


@every_model
def test_learns_both_labels_and_predicts_them_alike_everywhere(
    name: str, data: Path, tmp_path: Path
) -> None:
    summary = trained(name, data, tmp_path)

    result = infer(f"{tmp_path}/model", [], output=tmp_path / "out.tsv", allow_code=True)
    predictions = np.loadtxt(tmp_path / "out.tsv", delimiter="\t", dtype=np.float32)
    predictor = Predictor.load(tmp_path / "model", allow_code=True)
    samples = [(None, [], list(row)) for row in TEST.values[:50].astype(str).tolist()]
    clicked = TEST.click == 1

    assert result["predictions"] == list(predictor.tasks) == NAMES[name] == list(summary["tasks"])
    assert predictions.shape == (10_000, len(NAMES[name]))
    np.testing.assert_allclose(predictor.predict_samples(samples), predictions[:50], atol=1e-6)
    assert predictor.predict_samples([]).shape == (0, len(NAMES[name]))
    assert result["tasks"] == summary["tasks"]
    assert summary["auc"] == summary["tasks"]["click"]["auc"]
    assert summary["auc"] > auc(TEST.click, TEST.ctr) - 0.01
    of_bought = summary["tasks"]["bought"]
    if name == "esmm":
        assert of_bought["test_examples"] == clicked.sum()
        best = auc(TEST.bought[clicked], TEST.cvr[clicked])
        both = summary["tasks"]["click_and_bought"]
        assert both["test_examples"] == 10_000
        assert both["auc"] > auc(TEST.bought, TEST.ctr * TEST.cvr) - 0.015
        assert abs(both["calibration"] - 1) < 0.1
    else:
        assert of_bought["test_examples"] == 10_000
        best = auc(TEST.bought, TEST.ctr * TEST.cvr)
    assert of_bought["auc"] > best - 0.025


def test_learns_alike_from_memory_with_ids_in_predictions(data: Path, tmp_path: Path) -> None:
    """Rows in memory, shuffled: the other label stays with its row."""
    trained("esmm", data, tmp_path, "data.in_memory=true", "train.epochs=1")
    rows = "id,user,item,site\n" + "".join(
        f"row {n},{','.join(row)}\n" for n, row in enumerate(TEST.values[:5].astype(str).tolist())
    )
    (tmp_path / "new.csv").write_text(rows)  # without labels

    result = infer(
        f"{tmp_path}/model",
        [f"{tmp_path}/new.csv"],
        output=tmp_path / "out.tsv",
        id_column="id",
        overrides=["data.format=csv"],
    )
    lines = [line.split("\t") for line in (tmp_path / "out.tsv").read_text().splitlines()]

    assert result["auc"] is None
    assert "tasks" not in result
    assert [line[0] for line in lines] == [f"row {n}" for n in range(5)]
    found = np.array([line[1:] for line in lines], np.float64)
    np.testing.assert_allclose(found[:, 0] * found[:, 1], found[:, 2], atol=1e-6)


def test_trainer_evaluates_and_predicts_every_task(data: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")
    trainer = Trainer("mmoe", OPTIONS["mmoe"], schema=SCHEMA, train={"batch_size": 256})
    trainer.train(f"{data}/train.parquet")

    figures = trainer.evaluate(f"{data}/test.parquet")
    predictions = trainer.predict(f"{data}/test.parquet")

    assert predictions.shape == (10_000, 2)
    for k, (name, labels) in enumerate({"click": TEST.click, "bought": TEST.bought}.items()):
        assert figures["tasks"][name]["auc"] == pytest.approx(auc(labels, predictions[:, k]))


def test_validation_and_base_rate_are_of_the_first_label(data: Path, tmp_path: Path) -> None:
    summary = trained("mmoe", data, tmp_path, f"data.valid={data}/test.parquet", "train.epochs=1")

    (validation,) = summary["validations"]
    assert validation["auc"] == summary["auc"] == summary["tasks"]["click"]["auc"]
    (of_pass,) = summary["passes"]
    assert of_pass["examples"] == 40_000


SMALL = pa.table(
    {
        "user": ["a", "b", "c", "d"],
        "item": ["x", "y", "x", "y"],
        "site": ["s", "s", "t", "t"],
        "bought": [0, 1, 0, 1],
        "click": [0, 1, 1, 1],
    }
)


def written(folder: Path, suffix: str, table: pa.Table = SMALL) -> str:
    path = folder / f"rows.{suffix}"
    if suffix == "csv":
        rows = [",".join(table.column_names)]
        rows += [",".join(map(str, row.values())) for row in table.to_pylist()]
        path.write_text("".join(f"{row}\n" for row in rows))
    elif suffix == "orc":
        orc.write_table(table, path)
    else:
        parquet.write_table(table, path)
    return str(path)


def rows_of(path: str, schema: Schema = SCHEMA, **options: Any) -> Batch:
    dataset = QueueDataset(schema, batch_size=100, **options)
    dataset.set_filelist([path])
    (batch,) = dataset
    return batch


@pytest.mark.parametrize("suffix", ["csv", "parquet", "orc"])
def test_labels_are_read_by_name(tmp_path: Path, suffix: str) -> None:
    batch = rows_of(written(tmp_path, suffix))

    assert batch.labels.tolist() == [0, 1, 1, 1]
    assert batch.other_labels.tolist() == [[0], [1], [0], [1]]
    assert batch.other_labels.dtype == np.float32


def test_a_label_that_is_none_makes_its_row_malformed(tmp_path: Path) -> None:
    table = SMALL.set_column(3, "bought", pa.array([0, 2, None, 1]))
    path = written(tmp_path, "parquet", table)

    with pytest.raises(CtrPsError, match="row 2: the label 'bought' is 2, expected 0 or 1"):
        rows_of(path, bad_row_limit=0)
    assert rows_of(path, bad_row_limit=2).other_labels.tolist() == [[0], [1]]


def test_a_file_without_one_of_the_labels_is_for_prediction(tmp_path: Path) -> None:
    path = written(tmp_path, "csv", SMALL.drop_columns(["bought"]))

    with pytest.raises(DataError, match="no column 'bought', a label of the schema"):
        rows_of(path)
    batch = rows_of(path, replace(SCHEMA, is_for_prediction=True))
    assert batch.labels is not None
    assert batch.other_labels is None


def test_a_format_without_names_has_one_label(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("1\ta\tb\tc\n")

    with pytest.raises(DataError, match=r"'bought' as column of other labels.*such as CSV"):
        rows_of(str(tmp_path / "rows.tsv"))


def test_rows_in_memory_keep_their_labels_together(tmp_path: Path) -> None:
    schema = replace(SCHEMA, other_labels=("bought", "returned"))
    numbers = np.arange(1000)
    bits = [(numbers >> bit & 1).tolist() for bit in range(3)]
    table = pa.table(
        {
            "user": [f"u{n % 8}" for n in numbers],
            "item": ["i"] * 1000,
            "site": ["s"] * 1000,
            "click": bits[0],
            "bought": bits[1],
            "returned": bits[2],
        }
    )
    dataset = InMemoryDataset(schema, batch_size=64)
    dataset.set_filelist([written(tmp_path, "parquet", table)])
    dataset.load_into_memory()
    dataset.local_shuffle()
    by_key: dict[int, set[tuple[float, ...]]] = {}
    for batch in dataset:
        users = batch.keys.reshape(-1, 3)[:, 0].tolist()
        labels = np.column_stack([batch.labels, batch.other_labels]).tolist()
        for user, row in zip(users, labels, strict=True):
            by_key.setdefault(user, set()).add(tuple(row))

    assert len(by_key) == 8
    assert all(len(rows) == 1 for rows in by_key.values())
    assert {row for rows in by_key.values() for row in rows} == {
        (float(n & 1), float(n >> 1 & 1), float(n >> 2 & 1)) for n in range(8)
    }


def test_converted_files_keep_all_labels(tmp_path: Path) -> None:
    path = written(tmp_path, "csv")

    convert([path], tmp_path / "out", SCHEMA)
    (converted,) = (tmp_path / "out").glob("*.parquet")

    assert parquet.read_table(converted)["bought"].to_pylist() == [0, 1, 0, 1]
    assert rows_of(str(converted)).other_labels.tolist() == [[0], [1], [0], [1]]


def test_kept_negatives_are_weighted_in_every_task(data: Path, tmp_path: Path) -> None:
    settings = ("data.negative_rate=0.3", "data.negative_correction=weight", "train.epochs=1")

    with pytest.raises(CtrPsError, match="negative_correction = 'weight'"):
        trained("esmm", data, tmp_path / "refused", "data.negative_rate=0.3")
    summary = trained("esmm", data, tmp_path, *settings)

    assert summary["examples"] < 30_000
    for name in ("click", "click_and_bought"):
        assert abs(summary["tasks"][name]["calibration"] - 1) < 0.12
