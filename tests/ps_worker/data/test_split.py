"""Lists in text (`split` of a schema): the same values wherever the text comes from."""

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps import Trainer
from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_values import split_texts
from ctr_ps.ps_worker.data.columnar.tables import arrow_table
from ctr_ps.ps_worker.data.distinct_values import DistinctValues
from ctr_ps.ps_worker.data.formats import values_of_files
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.sources import opened
from ctr_ps.ps_worker.data.user_code.samples import batches_of_samples
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.extras.inference_server.tensors import samples_of, tensor_of_values
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.reference.features import key_of

SCHEMA = Schema(
    dense=(DenseColumn(name="age"),),
    slots=("user", "tags", "words"),
    split={"tags": "|", "words": ", "},
    label="click",
)
ROWS = [
    (1, 3.0, "ann", "a|b", "x, y"),
    (0, 4.0, "bob|c", "b", "x,y"),
    (0, 5.0, "", "", "y, "),
    (1, 6.0, "ann", "|", "é"),
    (0, 7.0, "cy", "||c||a|c", "x"),
]


def pieces(text: str, separator: str) -> list[str]:
    """Returns the values of a text, one empty one if it is missing: what `split` is said to mean."""
    return [each for each in text.split(separator) if each] if text else [""]


def expected_keys() -> list[list[int]]:
    """Returns the keys of each slot of each row."""
    found = []
    for _, _, user, tags, words in ROWS:
        for slot, values in enumerate([[user], pieces(tags, "|"), pieces(words, ", ")], 1):
            found.append([key_of(slot, value.encode()) for value in values])
    return found


def keys_in(batch: Batch) -> list[list[int]]:
    bounds = batch.offsets.tolist()
    return [batch.keys[i:j].tolist() for i, j in itertools.pairwise(bounds)]


def frame() -> pd.DataFrame:
    return pd.DataFrame(ROWS, columns=["click", *SCHEMA.features])


def read(data: Any, format: Any = None) -> Batch:
    files, format = opened(data, SCHEMA, format)
    dataset = QueueDataset(SCHEMA, batch_size=100, format=format)
    dataset.set_filelist(files)
    (batch,) = dataset
    return batch


def write(folder: Path, kind: str) -> str:
    path = folder / f"rows.{kind.partition('-')[0]}"
    if kind == "csv":
        frame().to_csv(path, index=False)
    else:
        table = pa.Table.from_pandas(frame())
        if kind == "parquet-categories":
            table = table.set_column(3, "tags", table["tags"].dictionary_encode())
        pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "parquet", "parquet-categories"])
def test_files_have_the_values_between_separators(tmp_path: Path, kind: str) -> None:
    assert keys_in(read(write(tmp_path, kind))) == expected_keys()


def test_frames_and_their_categories_have_them(tmp_path: Path) -> None:
    categories = frame().astype({"tags": "category"})

    assert keys_in(read(frame())) == expected_keys()
    assert keys_in(read(categories)) == expected_keys()


def test_converted_files_have_them(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    for keys in (False, True):
        converted = convert([path], tmp_path / f"out-{keys}", SCHEMA, keys=keys)
        assert keys_in(read([str(each) for each in converted.files])) == expected_keys()


def samples() -> list[Any]:
    return [(click, [age], list(slots)) for click, age, *slots in ROWS]


def test_samples_have_them() -> None:
    (batch,) = batches_of_samples(samples(), SCHEMA, batch_size=100)
    as_bytes = [
        (label, dense, [each.encode() for each in slots]) for label, dense, slots in samples()
    ]
    (of_bytes,) = batches_of_samples(as_bytes, SCHEMA, batch_size=100)

    assert keys_in(batch) == keys_in(of_bytes) == expected_keys()


@pytest.mark.parametrize("shape", [[5], [5, 1], [5, 2], [5, 4]])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_tensors_have_them(shape: list[int], has_lengths: bool) -> None:
    """Whatever the width of a tensor is, with and without numbers of texts."""
    tensors = [tensor_of_values("age", "FP32", [5], [row[1] for row in ROWS])]
    padding = [""] * (math.prod(shape) // 5 - 1)
    for index, slot in enumerate(SCHEMA.slots, 2):
        texts = [text for row in ROWS for text in (row[index], *padding)]
        tensors.append(tensor_of_values(slot, "BYTES", shape, texts))
        if has_lengths:
            lengths = [1 if row[index] else -1 for row in ROWS]
            tensors.append(tensor_of_values(f"{slot}.lengths", "INT32", [5], lengths))
    values = values_of_files(["x.csv"], SCHEMA, "csv")

    found = samples_of(tensors, SCHEMA, max_rows=10, values=values)

    (batch,) = batches_of_samples(found, SCHEMA, batch_size=100, meant=values)
    assert keys_in(batch) == expected_keys()


def test_texts_of_a_tensor_are_split_one_by_one() -> None:
    tensors = [
        tensor_of_values("age", "FP32", [2], [1, 2]),
        tensor_of_values("user", "BYTES", [2], ["ann", "ann"]),
        tensor_of_values("tags", "BYTES", [2, 3], ["a|b", "c", "", "|", "", "d"]),
        tensor_of_values("words", "INT64", [2, 2], [7, 8, 9, 7]),
    ]
    values = values_of_files(["x.csv"], SCHEMA, "csv")

    found = samples_of(tensors, SCHEMA, max_rows=10, values=values)

    slots = [slots[1:] for _, _, slots in found]
    assert slots == [[[b"a", b"b", b"c"], [7, 8]], [[b"d"], [9, 7]]]


def test_values_in_lists_are_taken_as_they_are() -> None:
    rows = [{"age": 1.0, "user": "ann", "tags": ["a|b", "c"], "words": None}]
    (batch,) = batches_of_samples([(None, [1.0], ["ann", ["a|b", "c"], ""])], SCHEMA, batch_size=1)

    expected = [key_of(2, b"a|b"), key_of(2, b"c")]
    assert keys_in(batch)[1] == expected
    schema = replace(SCHEMA, is_for_prediction=True)
    dataset = QueueDataset(schema, batch_size=1, format=opened(rows, schema, None)[1])
    dataset.set_filelist(["the table"])
    assert [keys_in(each)[1] for each in dataset] == [expected]


def test_model_predicts_the_same_from_everything(tmp_path: Path) -> None:
    path = write(tmp_path, "csv")
    trainer = Trainer("fm", {"dim": 2}, schema=SCHEMA)
    trainer.train(path, epochs=3)
    trainer.save(tmp_path / "model")
    predictor = Predictor.load(tmp_path / "model")

    expected = trainer.predict(path)

    assert np.ptp(expected) > 0
    features = frame().drop(columns="click")
    for found in (
        trainer.predict(features),
        trainer.predict([(None, *row[1:]) for row in samples()]),
        predictor.predict_samples([(None, *row[1:]) for row in samples()]),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    lists = features.assign(tags=[pieces(each, "|") for each in features["tags"]])
    np.testing.assert_allclose(trainer.predict(lists), expected, rtol=1e-6)


def test_values_are_those_of_lists(tmp_path: Path) -> None:
    values = DistinctValues([write(tmp_path, "csv")], SCHEMA, "tags", bad_rows=BadRows())

    found = [value for array, _ in values for value in array.to_pylist()]

    assert found == [b"a", b"b", b"c", b""]


def test_text_where_the_model_had_lists_is_doubted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = replace(SCHEMA, split={})
    lists = frame().assign(tags=[each.split("|") for each in frame()["tags"]])
    trainer = Trainer("lr", schema=schema)
    trainer.train(lists)
    caplog.clear()

    with caplog.at_level(logging.WARNING):
        trainer.predict([(None, [1.0], ["a|b", "a", "x"]), (None, [1.0], ["ann", "a|b", "x"])])
        trainer.predict([(None, [1.0], ["ann", "a|b", "x"])])
        trainer.predict(frame())

    messages = [each.message for each in caplog.records if "trained on lists" in each.message]
    assert len(messages) == 1
    assert "slot 'tags' has 'a|b', read as one value" in messages[0]


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("criteo", "1\t2\ta\tb|c\td"),
        ("libffm", "1 0:0:2 1:a:1 2:b|c:1 3:d:1"),
        ("libsvm", "1 7:1"),
        ("multislot", "1 2 1 7 1 8 1 9 1 1"),
    ],
)
def test_layout_without_names_is_refused(tmp_path: Path, format: str, row: str) -> None:
    suffix = {"criteo": "tsv", "libffm": "ffm", "libsvm": "svm"}.get(format, format)
    (tmp_path / f"rows.{suffix}").write_text(f"{row}\n")

    with pytest.raises(
        UsageError, match=f"the text of 'tags', 'words', but files of format '{format}'"
    ):
        read(str(tmp_path / f"rows.{suffix}"))


@given(
    texts=st.lists(st.none() | st.text("ab|", max_size=6), max_size=8),
    start=st.integers(0, 3),
    is_dictionary=st.booleans(),
)
def test_split_is_that_of_python(
    texts: Sequence[str | None], start: int, is_dictionary: bool
) -> None:
    array = pa.array(texts, pa.string())
    array = (array.dictionary_encode() if is_dictionary else array)[start:]

    found = split_texts(array, "|")

    found.validate(full=True)
    expected = [[s.encode() for s in t.split("|") if s] if t else None for t in texts[start:]]
    assert found.to_pylist() == expected
    assert arrow_table({"x": array}).num_rows == len(expected)
