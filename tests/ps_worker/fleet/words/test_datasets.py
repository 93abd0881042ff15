"""Datasets as Paddle's scripts make them give the batches of those that are made with a schema."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker import fleet

SCHEMA = Schema(dense=(DenseColumn(name="age", scale=10.0),), slots=("user", "ad"))
ROWS = [f"1 {age} 1 {age + 7} 2 {age} 9 1 {age % 2}" for age in range(10)]
NAMES = ["QueueDataset", "InMemoryDataset"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows"
    path.write_text("".join(f"{row}\n" for row in ROWS))
    return path


def keys_of(dataset: Any, path: Path) -> list[list[int]]:
    dataset.set_filelist([path])
    if isinstance(dataset, fleet.InMemoryDataset):
        dataset.load_into_memory()
    return [batch.keys.tolist() for batch in dataset]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["cat", "sed s/x/x/"])
def test_dataset_of_a_factory_reads_as_one_with_a_schema(
    name: str, command: str, rows: Path
) -> None:
    made = fleet.DatasetFactory().create_dataset(name)
    made.init(batch_size=4, thread_num=3, use_var=SCHEMA, pipe_command=command, fs_name="")
    expected = getattr(fleet, name)(SCHEMA, 4, format="multislot")

    assert isinstance(made, getattr(fleet, name))
    assert (made.batch_size, made.thread_num) == (4, 3)
    found = keys_of(made, rows)
    assert found == keys_of(expected, rows)
    assert sum(map(len, found)) == 3 * len(ROWS)


def test_files_may_be_read_by_their_suffix(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("age,user,ad,click\n10,u1,a1,1\n20,u2,a2,0\n")
    made = fleet.QueueDataset()
    made.init(batch_size=2, use_var=SCHEMA)

    (batch,) = (made.set_filelist([path]), *made)[1:]

    np.testing.assert_allclose(batch.dense.reshape(-1), [1.0, 2.0])


@pytest.mark.parametrize("command", ["cat", "cat -"])
def test_init_takes_the_columns_and_values_of_a_command(tmp_path: Path, command: str) -> None:
    path = tmp_path / "rows"
    path.write_text("1 1 1 u7 1 a1 1 0.5\n")
    made = fleet.QueueDataset()
    columns = ["click", "user", "ad", "dense_input"]
    made.init(use_var=SCHEMA, pipe_command=command, columns=columns, values="text")

    (batch,) = (made.set_filelist([path]), *made)[1:]

    assert batch.keys.tolist() == [key_of(1, "u7"), key_of(2, "a1")]
    np.testing.assert_array_equal(batch.labels, [1.0])
    np.testing.assert_allclose(batch.dense, [[0.05]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda it: it.set_filelist(["a"]) or list(it),
            r"init\(batch_size=32, thread_num=2, use_var",
        ),
        (lambda it: it.set_use_var([1]), r"set_use_var\(\) is set by init\(\)"),
        (lambda it: it.set_batch_size(3), r"set_batch_size\(\) is set by init\(\)"),
        (
            lambda it: it.init(use_var=[SimpleNamespace(name="user"), SimpleNamespace(name="ad")]),
            r"use_var of fleet\.QueueDataset is \[namespace\(name='user'.*, expected a Schema",
        ),
        (
            lambda it: it.init(use_var=SCHEMA, fs_name="hdfs://x"),
            "fs_name .* not supported: leave it out",
        ),
        (
            lambda it: it.init(use_var=SCHEMA, input_type=1),
            "input_type of .* is 1, but is not supported",
        ),
        (
            lambda it: it.init(use_var=SCHEMA, values="text"),
            "columns and values of .* of multi-slot text, but pipe_command is ''",
        ),
        (lambda it: it.init(use_var=SCHEMA, batch_size=0), "batch_size is 0"),
        (
            lambda it: it.init(batch_size=64),
            "use_var of .* is None, expected a Schema of the columns",
        ),
    ],
)
def test_what_is_missing_or_wrong_names_the_way(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(fleet.QueueDataset())


def test_dataset_is_made_once() -> None:
    dataset = fleet.QueueDataset(SCHEMA, 4)

    with pytest.raises(UsageError, match=r"has its columns already: call init\(\) only once"):
        dataset.init(use_var=SCHEMA)
    with pytest.raises(AttributeError, match=r"no 'set_fields': there are .*set_filelist, "):
        dataset.set_fields()
    with pytest.raises(UsageError, match=r"needs a batch_size: fleet\.QueueDataset\(schema, batch"):
        fleet.QueueDataset(SCHEMA)
    with pytest.raises(UsageError, match="needs a schema: "):
        fleet.InMemoryDataset(batch_size=4)
    with pytest.raises(UsageError, match="no dataset 'BoxPSDataset', only QueueDataset, InMem"):
        fleet.DatasetFactory().create_dataset("BoxPSDataset")
