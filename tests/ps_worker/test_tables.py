"""Tables as data from Python: the right values are those that files with the same rows give."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps import Predictor, Trainer
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, JobError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.parquet_orc import ParquetReader
from ctr_ps.ps_worker.data.columnar.tables import TableReader
from ctr_ps.ps_worker.extras.data_tools.samples import sample_of_table
from ctr_ps.ps_worker.trainer import Trained

SCHEMA = """
hash_version = 1
label = "clicked"
dense = [{ name = "age" }, { name = "price", transform = "log1p" }]
slots = ["user", "item", "tags"]
"""

ROWS = 600


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Schema:
    path = tmp_path_factory.mktemp("schema") / "schema.toml"
    path.write_text(SCHEMA)
    return Schema.load(path)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    users = rng.integers(0, 40, ROWS)
    price = rng.random(ROWS)
    price[::17] = np.nan
    return pd.DataFrame(
        {
            "day": pd.to_datetime("2026-11-01"),  # of no use to the schema
            "user": users,
            "item": pd.Categorical([f"item-{each}" for each in rng.integers(0, 25, ROWS)]),
            "tags": [[f"t{k}" for k in range(each % 3)] for each in range(ROWS)],
            "age": rng.integers(18, 80, ROWS).astype(np.int16),
            "price": price,
            "clicked": (users % 2 == 0) ^ (rng.random(ROWS) < 0.2),
        }
    )


def trainer_of(schema: Schema, **changes: Any) -> Trainer:
    sections = {"train": {"batch_size": 64, "seed": 1}, **changes}
    return Trainer("deepfm", {"dim": 4, "hidden": [8]}, schema=schema, **sections)


def from_pandas(frame: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(frame, preserve_index=False)


FORMS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "pandas, of Arrow types": lambda frame: from_pandas(frame).to_pandas(
        types_mapper=pd.ArrowDtype
    ),
    "pandas, with another index": lambda frame: frame.set_index(frame.index[::-1]),
    "polars": lambda frame: pl.from_arrow(from_pandas(frame)),
    "pyarrow": from_pandas,
    "pyarrow, in chunks": lambda frame: pa.concat_tables(
        from_pandas(frame.iloc[start : start + 100]) for start in range(0, ROWS, 100)
    ),
    "a stream of Arrow batches": lambda frame: from_pandas(frame).to_reader(max_chunksize=70),
    "dict of columns": lambda frame: {name: list(frame[name]) for name in frame},
    "dict of arrays": lambda frame: {name: frame[name].to_numpy() for name in frame},
    "list of dicts": lambda frame: frame.to_dict("records"),
}


@pytest.fixture(scope="module")
def by_file(schema: Schema, frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    pq.write_table(from_pandas(frame), path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_table_trains_and_predicts_as_a_file_of_its_rows(
    form: str, schema: Schema, frame: pd.DataFrame, by_file: Path, tmp_path: Path
) -> None:
    ours, theirs = trainer_of(schema), trainer_of(schema)
    assert ours.train(FORMS[form](frame), epochs=2).examples == 2 * ROWS
    theirs.train(by_file, epochs=2)

    expected = theirs.predict(by_file)
    assert expected.std() > 0.05
    np.testing.assert_array_equal(ours.predict(FORMS[form](frame)), expected)
    assert ours.evaluate(FORMS[form](frame)) == theirs.evaluate(by_file)
    predictor = Predictor.load(ours.save(tmp_path / "model"))
    np.testing.assert_array_equal(predictor.predict(FORMS[form](frame)), expected)


def test_rows_in_memory_are_shuffled_as_those_of_a_file(
    schema: Schema, frame: pd.DataFrame, by_file: Path
) -> None:
    data = {"in_memory": True, "shuffle": "local"}
    shuffled, ordered = trainer_of(schema, data=data), trainer_of(schema)
    for trainer in (shuffled, ordered):
        trainer.train(frame)
    from_file = trainer_of(schema, data=data)
    from_file.train(by_file)
    np.testing.assert_array_equal(shuffled.predict(frame), from_file.predict(frame))
    assert (shuffled.predict(frame) != ordered.predict(frame)).any()


def test_labels_may_be_missing_in_a_table_to_predict(schema: Schema, frame: pd.DataFrame) -> None:
    trainer = trainer_of(schema)
    trainer.train(frame)
    without = frame.drop(columns="clicked")
    np.testing.assert_array_equal(trainer.predict(without), trainer.predict(frame))
    with pytest.raises(DataError, match="the table: no column 'clicked', the label of the schema"):
        trainer.train(without)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": None}, "the table: no column 'user', which the schema requires"),
        ({"user": [0.5] * ROWS}, r"column 'user' is of type double, .*astype\('Int64'\)"),
        ({"user": [1, "x"] * (ROWS // 2)}, "column 'user' of the table cannot be read"),
        ({"clicked": [2] * ROWS}, "the table:row 1: the label is 2, expected 0 or 1"),
        ({"price": [np.inf] * ROWS}, "the table:row 1: column .price. is inf"),
    ],
)
def test_a_faulty_table_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str, schema: Schema, frame: pd.DataFrame
) -> None:
    trainer = trainer_of(schema)
    trainer.train(frame)
    before = trainer.predict(frame)
    faulty = (
        frame.assign(**change) if None not in change.values() else frame.drop(columns=[*change])
    )
    with pytest.raises(DataError, match=message):
        trainer.train(faulty)
    np.testing.assert_array_equal(trainer.predict(frame), before)


def test_a_malformed_row_is_skipped_in_training_but_not_in_predictions(
    schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    trainer = trainer_of(schema)
    faulty = frame.assign(price=[np.inf, *frame["price"][1:]])
    assert trainer.train(faulty).examples == ROWS - 1
    assert trainer.evaluate(faulty)["test_examples"] == ROWS - 1
    pq.write_table(from_pandas(faulty), tmp_path / "rows.parquet")
    for data in (faulty, tmp_path / "rows.parquet"):
        with pytest.raises(DataError, match=":row 1: column 'price' is inf"):
            trainer.predict(data)
    in_polars = FORMS["polars"](faulty)
    assert trainer.train(in_polars).examples == ROWS - 1
    with pytest.raises(DataError, match=":row 1: column 'price' is inf"):
        trainer.predict(in_polars)


def test_settings_of_data_leave_the_rows_of_a_frame_shuffled(frame: pd.DataFrame) -> None:
    def data_of(**section: Any) -> tuple[bool, str]:
        trainer = Trainer.from_frame(frame, "lr", label="clicked", data=section)
        return trainer.job.data.in_memory, trainer.job.data.shuffle

    assert data_of() == data_of(bad_row_limit=7) == (True, "local")
    assert data_of(shuffle="none") == data_of(in_memory=False) == (False, "none")


def test_a_row_whose_values_are_missing_is_predicted_as_beside_others() -> None:
    rng = np.random.default_rng(3)
    rows = pd.DataFrame(
        {
            "user": rng.choice([*"abcd"], 300),
            "vector": [rng.normal(size=3).tolist() for _ in range(300)],
            "device": [{"os": each} for each in rng.choice(["ios", "web"], 300)],
            "age": rng.normal(size=300),
            "click": rng.integers(0, 2, 300),
        }
    )
    trainer = Trainer.from_frame(rows, "lr", label="click")
    trainer.train(rows)
    missing = rows.head(2).astype(object)
    for name in ("user", "vector", "device", "age"):
        missing.at[0, name] = None

    both = trainer.predict(missing)

    np.testing.assert_array_equal(trainer.predict(missing.head(1)), both[:1])
    nan = missing.head(1).assign(user=np.nan)
    np.testing.assert_array_equal(trainer.predict(nan), both[:1])
    assert trainer.predict(rows[:0]).shape == (0,)
    with pytest.raises(DataError, match="no rows in 1 file"):
        trainer.train(rows[:0])


def test_several_tables_and_one_that_is_not_computed_yet_are_refused(
    schema: Schema, frame: pd.DataFrame
) -> None:
    trainer = trainer_of(schema)
    for method in (trainer.train, trainer.evaluate, trainer.predict):
        with pytest.raises(
            UsageError, match="a tuple of tables, expected one table, with the label"
        ):
            method((frame, frame["clicked"]))
        with pytest.raises(UsageError, match=r"data is <LazyFrame .*: collect\(\) it first"):
            method(pl.LazyFrame(COLUMNS))
    with pytest.raises(UsageError, match="a tuple of tables, expected one table, with the label"):
        Trainer.from_frame((frame, frame["clicked"]))  # type: ignore[arg-type]


COLUMNS = {name: [1, 0] for name in ("user", "item", "tags", "age", "price", "clicked")}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**COLUMNS, "clicked": [1, 0, 1]}, "the columns of the table have 2 to 3 rows"),
        ({**COLUMNS, "item": "ab"}, "column 'item' of the table is a str, expected a list"),
        ({**COLUMNS, "other": 1}, "column 'other' of the table is a int, expected a list"),
        ({**COLUMNS, "user": [2**64, 1]}, "column 'user' of the table cannot be read"),
        (pl.Series([1]), "the Series is no table of named columns"),
        (pd.Series([1]), "the Series is no table of named columns"),
        (
            [{**dict.fromkeys(COLUMNS, 1)}, {"user": 1}],
            "row 2 of the table has no 'item'; a missing value is None",
        ),
        (
            pa.Table.from_arrays([pa.array([1])] * 2, names=["user", "user"]),
            "column 'user' occurs twice in the table",
        ),
        (
            pd.DataFrame([[1, 2]], columns=["user", "user"]),
            "column 'user' occurs twice in the table",
        ),
        (
            pl.DataFrame({**COLUMNS, "item": pl.Series([object(), 1], dtype=pl.Object)}),
            "column 'item' of the table has fixed_size_binary",
        ),
    ],
)
def test_what_is_no_table_of_values_is_refused(data: Any, message: str, schema: Schema) -> None:
    for method in (trainer_of(schema).train, trainer_of(schema).predict):
        with pytest.raises(DataError, match=message):
            method(data)


def test_a_frame_without_a_header_has_numbers_as_names() -> None:
    numbered = Schema(dense=(), slots=("1", "2"), label="0")
    frame = pd.DataFrame([[1, 7, 8], [0, 9, 8]] * 50)
    trainer = Trainer("lr", schema=numbered, optimizer={"sparse": {"learning_rate": 0.5}})
    trainer.train(frame, epochs=5)
    clicked, other = trainer.predict(frame[:2])
    assert clicked > other + 0.2


@pytest.mark.parametrize("form", ["pandas", "polars"])
def test_values_may_be_missing_in_all_rows(
    form: str, schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    trainer = trainer_of(schema)
    trainer.train(frame)
    row = {"user": 3, "item": None, "tags": [], "age": 20.0, "price": None}
    expected = trainer.predict([(None, [20.0, None], ["3", "", []])])
    table = FORMS[form](pd.DataFrame([row])) if form == "pandas" else pl.DataFrame([row])
    np.testing.assert_array_equal(trainer.predict(table), expected)
    np.testing.assert_array_equal(trainer.predict([row]), expected)
    assert (
        trainer.predict(
            {**row, "user": [3], "item": [None], "tags": [[]], "age": [20.0], "price": [None]}
        )
        == expected
    )


def test_whole_numbers_from_2_to_63_are_values_too(schema: Schema, frame: pd.DataFrame) -> None:
    trainer = trainer_of(schema)
    large = frame.assign(user=frame["user"].to_numpy().astype(np.uint64) + np.uint64(2**63))
    trainer.train(large)
    np.testing.assert_array_equal(trainer.predict(large.to_dict("records")), trainer.predict(large))


@pytest.mark.parametrize("label", [None, np.nan, 7, "later"])
def test_labels_do_not_count_in_predictions(
    label: object, schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    trainer = trainer_of(schema)
    trainer.train(frame)
    expected, other = trainer.predict(frame), frame.assign(clicked=label)
    predictor = Predictor.load(trainer.save(tmp_path / "model"))
    pq.write_table(from_pandas(other), tmp_path / "rows.parquet")
    for data in (other, tmp_path / "rows.parquet"):
        np.testing.assert_array_equal(trainer.predict(data), expected)
        np.testing.assert_array_equal(predictor.predict(data), expected)


def test_what_was_refused_does_not_count_as_trained_on(schema: Schema, frame: pd.DataFrame) -> None:
    trainer = trainer_of(schema)
    keys = [(1, [20, 0.5], [7, "item-1", ["t1"]]), (0, [20, 0.5], [8, "item-2", []])]
    trainer.train(keys)
    before = trainer.predict(keys)
    with pytest.raises(DataError, match="no column 'clicked'"):
        trainer.train(frame.drop(columns="clicked"))
    np.testing.assert_array_equal(trainer.predict(keys), before)


@pytest.mark.parametrize(
    ("valid", "error"),
    [("no column", DataError), ("no file", DataError), (5, UsageError), ([], DataError)],
)
def test_an_impossible_valid_is_refused_before_training(
    valid: Any, error: type[Exception], schema: Schema, frame: pd.DataFrame
) -> None:
    trainer = trainer_of(schema)
    before = trainer.predict(frame)
    data = {"no column": frame.drop(columns="user"), "no file": "/none/*.csv"}.get(
        str(valid), valid
    )
    with pytest.raises(error):
        trainer.train(frame, valid=data)
    np.testing.assert_array_equal(trainer.predict(frame), before)


def test_a_model_trained_by_a_command_predicts_tables_without_consent(
    schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("2 20 0.5 1 7 1 8 1 9 1 1\n" * 20)
    data = {"pipe_command": "cat", "values": "text"}
    trainer = trainer_of(schema, data=data)
    trainer.train(path)
    model = trainer.save(tmp_path / "model")
    texts = {"user": ["7"], "item": ["8"], "tags": [["9"]], "age": [20.0], "price": [0.5]}
    np.testing.assert_array_equal(Predictor.load(model).predict(texts), trainer.predict(texts))


def test_numbers_mean_what_they_did_in_training(
    schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    texts = frame.assign(user=[f"{each:02}" for each in frame["user"]])
    trainer = trainer_of(schema)
    trainer.train(texts)
    predictor = Predictor.load(trainer.save(tmp_path / "texts"))
    for predict in (trainer.predict, trainer.evaluate, predictor.predict):
        with pytest.raises(
            DataError, match=r"slot 'user' .*trained on text, where '7' and '07' differ"
        ):
            predict(frame)

    keys = trainer_of(schema)
    keys.train([(1, [20, 0.5], [7, "item-1", ["t1"]]), (0, [20, 0.5], [8, "item-2", []])])
    with pytest.raises(DataError, match=r"slot 'user' .*trained on keys: give samples, a Batch"):
        keys.predict(frame)
    for each in (texts, texts.astype({"user": "category"})):
        with pytest.raises(
            DataError, match=r"slot 'user' .*trained on keys, not on hashes of text"
        ):
            keys.predict(each)


@pytest.mark.parametrize("kind", ["plain", "dictionary", "list"])
def test_numbers_mean_what_they_did_whatever_holds_them(
    kind: str, schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    def table(of: type) -> pa.Table:
        values = pa.array([of(each) for each in frame["user"]])
        if kind == "dictionary":
            values = values.dictionary_encode()
        elif kind == "list":
            values = pa.array([[each] for each in values.to_pylist()])
        return from_pandas(frame.drop(columns="user")).append_column("user", values)

    trainer = trainer_of(schema)
    trainer.train(table(str))
    loaded = trainer_of(schema)
    loaded.load(trainer.save(tmp_path / "texts"))
    for each in (trainer, loaded):
        np.testing.assert_array_equal(each.predict(table(str)), trainer.predict(table(str)))
        with pytest.raises(DataError, match=r"slot 'user' .*trained on text"):
            each.predict(table(int))


def test_a_table_is_read_from_an_offset_and_says_which_row_is_bad(
    schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    rows = from_pandas(pd.concat([frame] * 10, ignore_index=True).assign(price=1.0))
    pq.write_table(rows, tmp_path / "rows.parquet")
    bad_rows = BadRows(0)
    ours = TableReader(rows, schema, bad_rows)
    theirs = ParquetReader(schema, bad_rows)
    (split,) = theirs.splits(str(tmp_path / "rows.parquet"), 1)
    for offset in (None, 0, 1, 4097, ROWS * 10 - 1):
        found = []
        for reader in (ours, theirs):
            parts = list(reader.columns(split, offset))
            offsets = np.concatenate([part.offsets for part in parts])
            labels = np.concatenate([part.row_columns["labels"] for part in parts])
            found.append((offsets, labels))
        np.testing.assert_array_equal(*found)
        assert found[0][0][0] == (offset or 0)

    faulty = rows.to_pandas()
    faulty.loc[5000, "price"] = np.inf
    with pytest.raises(DataError, match=":row 5001: column 'price' is inf"):
        trainer_of(schema).predict(faulty)


def test_calls_shuffle_as_the_epochs_of_one(schema: Schema, frame: pd.DataFrame) -> None:
    data = {"in_memory": True, "shuffle": "local"}
    twice, once, repeated = (trainer_of(schema, data=data) for _ in range(3))
    twice.train(frame)
    twice.train(frame)
    once.train(frame, epochs=2)
    np.testing.assert_array_equal(twice.predict(frame), once.predict(frame))
    repeated.train(frame)
    assert (repeated.predict(frame) != once.predict(frame)).any()


def test_of_an_empty_table_nothing_is_predicted(
    schema: Schema, frame: pd.DataFrame, tmp_path: Path
) -> None:
    trainer = trainer_of(schema)
    trainer.train(frame)
    predictor = Predictor.load(trainer.save(tmp_path / "model"))
    for predict in (trainer.predict, predictor.predict):
        assert predict(frame[:0]).shape == (0,)
    with pytest.raises(DataError, match="no rows in 1 file: the table"):
        trainer.train(frame[:0])


def test_an_untrained_model_predicts_any_table(schema: Schema, frame: pd.DataFrame) -> None:
    assert trainer_of(schema).predict(frame).shape == (ROWS,)


@pytest.fixture(scope="module")
def split(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    return frame.iloc[:400], frame.iloc[400:]


OVERFITTING = {"optimizer": {"sparse": {"name": "adagrad", "learning_rate": 0.5}}}


@pytest.mark.parametrize("metric", ["log_loss", "auc"])
def test_training_stops_when_validations_get_no_better(
    metric: str, schema: Schema, split: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    train, valid = split
    trainer = trainer_of(schema, **OVERFITTING)
    trained = trainer.train(train, epochs=30, valid=valid, metric=metric, patience=2)

    scores = [
        getattr(each, metric) * (1 if metric == "auc" else -1) for each in trained.validations
    ]
    assert [each.epoch for each in trained.validations] == [*range(1, len(scores) + 1)]
    assert len(scores) < 30
    assert int(np.argmax(scores)) == len(scores) - 3
    assert trained.examples == len(scores) * len(train)
    assert trainer.evaluate(valid)[metric] == getattr(trained.validations[-1], metric)


def test_a_function_of_ones_own_is_called_after_each_epoch_and_may_end_training(
    schema: Schema, split: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    train, valid = split
    told: list[Trained] = []
    found: list[Any] = []

    def on_epoch(trained: Trained) -> bool:
        told.append(trained)
        found.append(trainer.evaluate(valid)["log_loss"])
        return len(told) == 3

    trainer = trainer_of(schema, **OVERFITTING)
    trained = trainer.train(train, epochs=9, valid=valid, on_epoch=on_epoch)

    assert [each.examples for each in told] == [len(train), 2 * len(train), 3 * len(train)]
    assert trained.examples == 3 * len(train)
    assert [each.log_loss for each in trained.validations] == found
    assert [len(each.validations) for each in told] == [1, 2, 3]  # each as it was then
    assert trained.best == min(trained.validations, key=lambda it: it.log_loss or 0)
    assert told[0].best == trained.validations[0]
    assert told[0].loss > told[2].loss


def test_the_final_model_is_the_best_and_trains_on(
    schema: Schema, split: tuple[pd.DataFrame, pd.DataFrame], tmp_path: Path
) -> None:
    train, valid = split
    best, by_hand = trainer_of(schema, **OVERFITTING), trainer_of(schema, **OVERFITTING)
    store = weakref.ref(best._run.store)
    trained = best.train(train, epochs=30, valid=valid, patience=2, final_model="best")
    assert trained.best == trained.validations[-3]
    gc.collect()
    assert store() is None  # that of the last epoch
    by_hand.train(train, epochs=len(trained.validations) - 2)

    np.testing.assert_array_equal(best.predict(valid), by_hand.predict(valid))
    for trainer in (best, by_hand):
        trainer.train(train)
    np.testing.assert_array_equal(best.predict(valid), by_hand.predict(valid))
    again = [each.train(train, valid=valid).validations for each in (best, by_hand)]
    assert again[0] == again[1]  # epochs and steps, too
    assert again[0][0].log_loss > min(each.log_loss or 9 for each in trained.validations)
    with pytest.raises(UsageError, match="training has begun"):
        best.load(best.save(tmp_path / "model"))


def test_validations_leave_the_steps_as_they_are(
    schema: Schema, split: tuple[pd.DataFrame, pd.DataFrame]
) -> None:
    train, valid = split
    with_valid, without = trainer_of(schema), trainer_of(schema)
    with_valid.train(train, epochs=3, valid=valid)
    without.train(train, epochs=3)
    np.testing.assert_array_equal(with_valid.predict(valid), without.predict(valid))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 1}, "need data to evaluate on: give valid="),
        ({"final_model": "best"}, "need data to evaluate on: give valid="),
        ({"valid": "V", "patience": -1}, "patience is -1"),
        ({"valid": "V", "metric": "AUC"}, "metric is 'AUC', expected one of log_loss, auc"),
        (
            {"valid": "V", "final_model": "first"},
            "final_model is 'first', expected 'last' or 'best'",
        ),
        ({"valid": "I", "epochs": 2}, "valid is .* which can be iterated only once"),
    ],
)
def test_wrong_arguments_train_nothing(
    arguments: dict[str, Any], message: str, schema: Schema, frame: pd.DataFrame
) -> None:
    given = {"V": frame, "I": iter([])}
    arguments = {name: given.get(str(each), each) for name, each in arguments.items()}
    trainer = trainer_of(schema)
    before = trainer.predict(frame)
    with pytest.raises(UsageError, match=message):
        trainer.train(frame, **arguments)
    np.testing.assert_array_equal(trainer.predict(frame), before)


def test_auc_needs_rows_of_both_kinds(schema: Schema, frame: pd.DataFrame) -> None:
    clicked = frame[frame["clicked"]]
    with pytest.raises(DataError, match=r"metric is 'auc'.* rows with a click and rows without"):
        trainer_of(schema).train(frame, valid=clicked, metric="auc")


def test_a_frame_proposes_its_schema(frame: pd.DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    odd = frame.assign(thing=[object() for _ in range(ROWS)])
    with pytest.raises(DataError, match="column 'thing' of the table cannot be read"):
        Trainer.from_frame(odd, label="clicked")
    caplog.set_level("INFO")
    trainer = Trainer.from_frame(
        odd, options={"dim": 4, "hidden": [8]}, ignore=["thing"], train={"batch_size": 64}
    )
    assert trainer.schema.label == "clicked"  # a usual name
    assert set(trainer.schema.slots) == {"user", "item", "tags", "age"}  # of 62 values
    assert [column.name for column in trainer.schema.dense] == ["price"]
    assert trainer.schema.dense[0].missing_indicator
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"][:1]
    assert warning.startswith("column day is ignored: ")
    assert trainer.job.data.shuffle == "local"
    with pytest.raises(UsageError, match="ignore is 'day', expected a list"):
        Trainer.from_frame(frame, ignore="day")
    trainer.train(odd, epochs=3)
    assert (trainer.evaluate(odd)["auc"] or 0) > 0.6
    with pytest.raises(UsageError, match="there is no column 'klicked', did you mean 'clicked'"):
        Trainer.from_frame(frame, label="klicked")
    with pytest.raises(DataError, match="no rows in the table"):
        Trainer.from_frame(frame[:0])


def test_a_large_frame_is_sampled_from_all_over(frame: pd.DataFrame) -> None:
    rows = pd.concat([frame] * 400, ignore_index=True)
    rows["number"] = np.arange(len(rows)) // 30_000 * 1.5  # 8 values, the last ones at the end
    sample = sample_of_table(pa.Table.from_pandas(rows, preserve_index=False))
    assert (sample.num_rows, sample.total_rows, sample.is_complete) == (200_000, 240_000, False)
    assert len(sample.columns["number"].unique()) == 8


def test_importance_finds_the_column_that_matters(schema: Schema, frame: pd.DataFrame) -> None:
    trainer = trainer_of(schema, **OVERFITTING)
    trainer.train(frame, epochs=3)
    found = trainer.importance(frame, rows=500)
    assert found.examples == 500
    assert found.features[0].name == "user"
    assert {each.name for each in found.features} == set(schema.features)
    assert found.features[0].auc_lost > 0.1
    assert found.auc == trainer.evaluate(frame[:500])["auc"]


def test_a_vector_is_one_feature() -> None:
    rng = np.random.default_rng(5)
    clicked = rng.integers(0, 2, ROWS)
    vectors = rng.normal(size=(ROWS, 3)) + np.outer(clicked, [0, 1, 0])
    rows = pd.DataFrame({"user": rng.choice([*"abc"], ROWS), "v": [*vectors], "click": clicked})
    trainer = Trainer.from_frame(rows, "lr")
    trainer.train(rows, epochs=20)

    found = trainer.importance(rows)

    assert [each.name for each in found.features] == ["v", "user"]
    assert found.features[0].auc_lost > 0.1


@pytest.mark.parametrize("label", [0, 1])
def test_labels_of_one_class_are_warned_of(label: int, caplog: pytest.LogCaptureFixture) -> None:
    rows = pd.DataFrame({"user": ["a", "b"] * 20, "click": [0, 1] * 20})
    trainer = Trainer.from_frame(rows, "lr")

    trainer.train(rows.assign(click=label))

    assert f"column 'click' is {label} in all 40 rows, so there is nothing to learn" in caplog.text


def test_a_model_of_other_numbers_names_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    rows = pd.DataFrame({"user": [*"ab"] * 50, "click": rng.integers(0, 2, 100)})
    rows = rows.assign(age=rng.normal(size=100), price=rng.normal(size=100))
    trainer = Trainer.from_frame(rows, "lr")
    trainer.train(rows)
    saved = trainer.save(tmp_path / "model")

    other = Trainer.from_frame(rows.assign(age=rows["age"] * 9).rename(columns={"price": "cost"}))

    message = "another schema: numbers missing: price; new: cost; scaled otherwise: age"
    with pytest.raises(JobError, match=message):
        other.load(saved)


def test_values_that_training_did_not_have_are_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = pd.DataFrame({"user": ["a", "b"] * 20, "click": [0, 1] * 20})
    trainer = Trainer.from_frame(rows, "lr")
    trainer.predict(rows)
    trainer.train(rows)
    assert trainer.evaluate(rows)["unknown_values"] == {}
    assert "unknown" not in caplog.text  # nor before it was trained

    others = pd.DataFrame({"user": ["a", "c", "d", "c"], "click": [0, 1, 1, 0]})

    assert trainer.evaluate(others)["unknown_values"] == {"user": 0.75}
    assert "75.0% of 'user'" in caplog.text
    caplog.clear()
    trainer.predict(others)
    assert "75.0% of 'user'" in caplog.text
