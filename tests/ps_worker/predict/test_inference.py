"""Offline inference with a model that a job trained and saved."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import BadRowError, DataError, UsageError
from ctr_ps.protos.store import InferenceSettings
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import export_inference
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.predict.inference import infer
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.support.training import job_of, train_alone


@pytest.fixture
def model(tmp_path: Path) -> str:
    generate(tmp_path, rows=48, test_rows=100, files=1, test_files=1, seed=1)
    return trained(tmp_path, "train/*", "model.hidden=[4]", "train.batch_size=16")


def trained(folder: Path, data: str, *settings: str) -> str:
    """Trains on files in a folder; returns its checkpoints."""
    saves = f"checkpoint.dir={folder}/model"
    train_alone(job_of(f"data.train={folder}/{data}", saves, *settings))
    return f"{folder}/model"


def trained_on_users(folder: Path, data: str, *settings: str) -> str:
    """Trains `lr` on files of the columns in `schema.toml`."""
    return trained(folder, data, f"data.schema={folder}/schema.toml", "model.name=lr", *settings)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """100 rows, with a malformed one among them."""
    (path,) = (tmp_path / "test").iterdir()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "1\tshort\n", *lines[3:]]))
    return str(path)


def test_line_of_the_output_is_that_of_the_row(model: str, rows: str, tmp_path: Path) -> None:
    output = tmp_path / "predictions.txt"

    with pytest.raises(BadRowError, match=r":4: .*bad_row_limit is 0"):
        infer(model, [rows], output=output)
    assert list(tmp_path.glob("*predictions*")) == []
    assert infer(model, [rows])["bad_rows"] == 1

    result = infer(model, [rows], output=output, overrides=["data.bad_row_limit=1"])
    assert (result["rows"], result["bad_rows"]) == (100, 1)
    assert len(output.read_text().splitlines()) == 100


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_predicts_with_what_was_exported_for_it(model: str, tmp_path: Path, dtype: str) -> None:
    data, exported = [f"{tmp_path}/test/*"], tmp_path / "exported"
    trained = infer(model, data)
    export_inference(Checkpoint.open(model), exported, InferenceSettings(dtype=dtype))

    found = infer(str(exported), data)

    assert found["log_loss"] == pytest.approx(trained["log_loss"], rel=1e-3)
    assert (found["log_loss"] == trained["log_loss"]) == (dtype == "float32")


def test_label_that_the_schema_names_may_be_absent(tmp_path: Path) -> None:
    """As data to predict has no clicks yet; training on such a file is an error."""
    (tmp_path / "schema.toml").write_text(
        'hash_version = 1\nlabel = "bought"\nslots = ["user"]\ndense = []\n'
    )
    (tmp_path / "train.csv").write_text("user,bought\n" + "a,1\nb,0\n" * 8)
    (tmp_path / "new.csv").write_text("user\na\nb\nc\n")
    trained_on_users(tmp_path, "train.csv", "train.batch_size=4")

    assert infer(f"{tmp_path}/model", [f"{tmp_path}/train.csv"])["auc"] is not None
    new = infer(f"{tmp_path}/model", [f"{tmp_path}/new.csv"])
    assert (new["rows"], new["auc"]) == (3, None)
    # Predictions are in the order of the files given.
    (tmp_path / "b.csv").write_text("user\nb\nb\n")
    (tmp_path / "a.csv").write_text("user\na\n")
    output = tmp_path / "p.txt"
    infer(f"{tmp_path}/model", [f"{tmp_path}/b.csv", f"{tmp_path}/a.csv"], output=output)
    first, second, third = map(float, output.read_text().split())
    assert first == second < third


def test_predictions_are_named_by_a_column(tmp_path: Path) -> None:
    """By that of the schema, by another that `--id` names, or by none."""
    (tmp_path / "schema.toml").write_text(
        'hash_version = 1\nid = "row"\nslots = ["user"]\ndense = []\n'
    )
    rows = ["row,user,label", *(f"r{i},{'ab'[i % 2]},{i % 2}" for i in range(10))]
    (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
    model = trained_on_users(tmp_path, "a.csv", "train.batch_size=4")
    data, output = [f"{tmp_path}/a.csv"], tmp_path / "predictions"

    def lines(**options: str) -> list[list[str]]:
        infer(model, data, output=output, **options)
        return [line.split("\t") for line in output.read_text().splitlines()]

    named, by_user = lines(), lines(id_column="user")
    assert [name for name, _ in named] == [f"r{i}" for i in range(10)]
    assert [name for name, _ in by_user] == ["a", "b"] * 5
    assert [value for _, value in named] == [value for _, value in by_user]
    with pytest.raises(DataError, match="no column 'usr', the id of the schema, did you mean"):
        infer(model, data, output=output, id_column="usr")
    with pytest.raises(
        UsageError, match="--id user: ids are only written with predictions: give --out"
    ):
        infer(model, data, id_column="user")
    assert infer(model, data)["rows"] == 10


@pytest.mark.parametrize("id_line", ["", 'id = "user"'])
def test_predictions_in_text_are_the_float32_that_were_predicted(
    id_line: str, tmp_path: Path
) -> None:
    """Also those far below 1e-7, which fixed digits would round to 0."""
    (tmp_path / "schema.toml").write_text(
        f'hash_version = 1\nslots = ["user"]\ndense = []\n{id_line}\n'
    )
    users = [f"u{i % 7}" for i in range(64)]
    rows = "".join(f"{user},{int(i == 7)}\n" for i, user in enumerate(users))
    (tmp_path / "a.csv").write_text(f"user,label\n{rows}")
    sgd = "{name='sgd', learning_rate=0.01}"
    optimizers = [f"optimizer.sparse={sgd}", f"optimizer.dense={sgd}"]
    trained_on_users(tmp_path, "a.csv", "train.base_rate=4e-8", *optimizers)
    output = tmp_path / "predictions.txt"

    infer(f"{tmp_path}/model", [f"{tmp_path}/a.csv"], output=output)

    found = [np.float32(line.split("\t")[-1]) for line in output.read_text().splitlines()]
    predictor = Predictor.load(tmp_path / "model")
    expected = predictor.predict_samples([(None, [], [user]) for user in users])
    assert found == expected.tolist()
    assert 0 < max(found) < 5e-8
    assert len(set(found)) > 1


def test_format_without_names_has_no_ids(model: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="the schema names 'user' as column of ids, which this format"
    ):
        infer(model, [f"{tmp_path}/test/*"], output=tmp_path / "out", id_column="user")


def test_output_is_compressed_as_its_name_says(model: str, tmp_path: Path) -> None:
    output = tmp_path / "predictions.txt.gz"

    infer(model, [f"{tmp_path}/test/*"], output=output)

    assert len(gzip.decompress(output.read_bytes()).splitlines()) == 100


@pytest.mark.parametrize("output", ["none/predictions", "."])
def test_output_that_cannot_be_is_refused(model: str, output: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--output: cannot write"):
        infer(model, [f"{tmp_path}/test/*"], output=tmp_path / output)


def test_values_that_the_model_does_not_know_are_counted_by_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As numbers with a decimal point, which pandas writes beside missing ones, are others than without."""
    (tmp_path / "schema.toml").write_text(
        'hash_version = 1\nlabel = "click"\nslots = ["user", "item"]\ndense = []\n'
    )
    (tmp_path / "train.csv").write_text("user,item,click\n" + "7,a,1\n8,b,0\n" * 8)
    (tmp_path / "new.csv").write_text("user,item,click\n7.0,a,1\n8.0,b,0\n8.0,c,1\n7,a,1\n")
    trained_on_users(tmp_path, "train.csv", "train.batch_size=4")
    model = f"{tmp_path}/model"

    assert infer(model, [f"{tmp_path}/train.csv"])["unknown_values"] == {}
    assert not caplog.records
    found = infer(model, [f"{tmp_path}/new.csv"])

    assert found["unknown_values"] == {"user": 0.75, "item": 0.25}
    (record,) = caplog.records
    assert "75.0% of 'user'; are they written as in the data" in record.message
