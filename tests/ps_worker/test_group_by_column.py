"""GAUC by a column that is no feature: in each format that names its columns, checked before training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, orc
from sklearn.metrics import roc_auc_score

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import DataError, JobError
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from tests.support.training import worker_role

SCHEMA = Schema(dense=(DenseColumn(name="age"),), slots=("item",), label="click")
ROWS = 300
WRITERS = {"csv": csv.write_csv, "parquet": pq.write_table, "orc": orc.write_table}


def table_of(users: list[str | int | None], seed: int = 1) -> pa.Table:
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user": pa.array(users),
            "click": rng.integers(0, 2, ROWS),
            "item": rng.integers(0, 5, ROWS),
            "age": rng.integers(20, 60, ROWS).astype(np.float64),
        }
    )


def users_of(names: list[str | int | None], seed: int = 2) -> list[str | int | None]:
    return [names[index] for index in np.random.default_rng(seed).integers(0, len(names), ROWS)]


def job_of(folder: Path, path: Path, *overrides: str) -> Job:
    schema = folder / "schema.toml"
    schema.write_text(SCHEMA.to_toml())
    own = [f"data.schema={schema}", f"data.test={path}", "train.batch_size=64"]
    model = ["model.hidden=[4]", "model.dim=2"]
    return override_job({}, [*own, *model, *overrides], source="test")


def written(path: Path, table: pa.Table) -> Path:
    WRITERS[path.suffix[1:]](table, path)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    "names", [["ann", "bob", "café", "", None], [7, -8, 10**12, None]], ids=["text", "numbers"]
)
def test_gauc_is_that_of_the_rows_of_each_value(
    tmp_path: Path, suffix: str, names: list[str | int | None]
) -> None:
    table = table_of(users_of(names))
    job = job_of(tmp_path, written(tmp_path / f"test.{suffix}", table), "valid.group_by=user")
    predictions = np.random.default_rng(3).random(ROWS).astype(np.float32)
    users, clicks = np.array(table["user"].to_pylist(), object), table["click"].to_numpy()
    groups = [users == name for name in names if name not in ("", None)]
    aucs = [roc_auc_score(clicks[is_in], predictions[is_in]) for is_in in groups]
    sizes = [np.count_nonzero(is_in) for is_in in groups]

    breakdown, start = breakdown_of(job, SCHEMA)(), 0
    for batch in evaluated(job, SCHEMA, [str(job.data.test[0])]):
        breakdown.add(batch, predictions[start : start + batch.size])
        start += batch.size
    figures = breakdown.figures()

    assert start == ROWS
    assert figures["gauc"] == pytest.approx(np.average(aucs, weights=sizes))
    assert figures["groups"] == {
        "group_by": "user",
        "groups": 3,
        "one_class_groups": 0,
        "one_class_examples": 0,
        "examples_without_value": ROWS - sum(sizes),
    }


def test_figures_of_training_and_infer_are_the_same(tmp_path: Path) -> None:
    table = table_of(users_of(["ann", "bob", None]))
    path = written(tmp_path / "rows.csv", table)
    names = [f"data.train={path}", f"data.valid={path}", "valid.group_by=user"]
    job = job_of(tmp_path, path, *names, f"checkpoint.dir={tmp_path}/model")

    told = train_job(plan_of(job, worker_role(worker=0, num_workers=1)), ParameterStore()).as_json()
    inferred = infer(f"{tmp_path}/model", [str(path)])

    assert told["groups"]["groups"] == 2
    assert (told["gauc"], told["groups"]) == (inferred["gauc"], inferred["groups"])


def test_rows_to_predict_need_the_column_only_with_labels(tmp_path: Path) -> None:
    table = table_of(users_of(["ann"]))
    job = job_of(tmp_path, written(tmp_path / "test.csv", table), "valid.group_by=user")
    schema = replace(SCHEMA, is_for_prediction=True)
    labelled = written(tmp_path / "labelled.csv", table.drop_columns("user"))
    bare = written(tmp_path / "bare.csv", table.drop_columns(["user", "click"]))

    (batch, *_) = evaluated(job, schema, [str(bare)])

    assert batch.labels is None
    assert batch.groups is None
    with pytest.raises(DataError, match=r"no column 'user', which valid\.group_by names"):
        next(iter(evaluated(job, schema, [str(labelled)])))


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("key", ["test", "valid"])
def test_column_that_no_file_has_is_refused_before_training(
    tmp_path: Path, suffix: str, key: str
) -> None:
    path = written(tmp_path / f"a.{suffix}", table_of(users_of(["ann"])))
    job = job_of(tmp_path, path, "data.test=[]", f"data.{key}={path}", "valid.group_by=usr")

    with pytest.raises(
        DataError,
        match=rf"a\.{suffix}: no column 'usr', which valid.group_by names, did you mean 'user'",
    ):
        plan_of(job)


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.string())])
def test_column_of_a_type_without_groups_is_refused_before_training(
    tmp_path: Path, kind: pa.DataType
) -> None:
    table = table_of(users_of(["ann"])).set_column(0, "user", pa.nulls(ROWS, kind))
    job = job_of(tmp_path, written(tmp_path / "a.parquet", table), "valid.group_by=user")

    expected = r"column 'user' is of type .*, expected text or whole numbers for valid\.group_by"
    with pytest.raises(DataError, match=expected):
        plan_of(job)


@pytest.mark.parametrize("suffix", ["tsv", "multislot", "libffm"])
def test_format_without_names_is_refused_before_training(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text("")  # is not opened

    with pytest.raises(
        JobError,
        match=rf"valid\.group_by: .*did you mean 'item'\?.*CSV, Parquet and ORC.*a\.{suffix}",
    ):
        plan_of(job_of(tmp_path, path, "valid.group_by=items"))


def test_output_of_a_command_has_no_columns_to_group_by(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", table_of(users_of(["ann"])))

    with pytest.raises(JobError, match=r"valid\.group_by: .*a\.csv has none of these formats"):
        plan_of(job_of(tmp_path, path, "valid.group_by=user", "data.pipe_command=exit 9"))
