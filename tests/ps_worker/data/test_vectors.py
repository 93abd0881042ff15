"""Lists of numbers as dense columns (`width` of a schema), from every format that has lists."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, orc

from ctr_ps.ctr_model.schema import Schema, SchemaError
from ctr_ps.protos.errors import BadRowError, DataError
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.sources import opened
from ctr_ps.ps_worker.extras.data_tools.convert import convert

TEXT = """
hash_version = 1
slots = ["user"]
label = "click"
dense = [
    { name = "age" },
    { name = "item.emb", width = 3, shift = 1.0, missing = 9.0 },
]
"""
ROWS = [
    {"click": 1, "user": "a", "age": 1.0, "item": {"emb": [1.0, 2.5, -3.0]}},
    {"click": 0, "user": "b", "age": 2.0, "item": {"emb": None}},
    {"click": 0, "user": "a", "age": None, "item": None},
    {"click": 1, "user": "c", "age": 3.0, "item": {"emb": [4.0, None, 6.0]}},
]
EXPECTED = [[1, 0, 1.5, -4], [2, 9, 9, 9], [0, 9, 9, 9], [3, 3, 9, 5]]
SCHEMA = Schema.from_dict(
    {
        "hash_version": 1,
        "slots": ["user"],
        "label": "click",
        "dense": [{"name": "age"}, {"name": "item.emb", "width": 3, "shift": 1.0, "missing": 9.0}],
    }
)
KINDS = [pa.list_(pa.float32()), pa.large_list(pa.float64()), pa.list_(pa.float32(), 3)]


def read(data: Any, **options: Any) -> list[list[float]]:
    files, format = opened(data, SCHEMA, None)
    dataset = QueueDataset(SCHEMA, batch_size=100, format=format, **options)
    dataset.set_filelist(files)
    return joined(list(dataset)).dense.tolist()


def table(rows: list[Any], kind: pa.DataType = KINDS[0]) -> pa.Table:
    item = pa.array([row["item"] for row in rows], pa.struct([("emb", kind)]))
    others = {name: [row[name] for row in rows] for name in ("click", "user", "age")}
    return pa.table({**others, "item": item})


def write(folder: Path, suffix: str, rows: list[Any]) -> Path:
    path = folder / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        writers = {
            "parquet": pq.write_table,
            "orc": orc.write_table,
            "feather": feather.write_feather,
        }
        writers[suffix](table(rows), str(path))
    return path


formats = pytest.mark.parametrize("suffix", ["parquet", "orc", "feather", "jsonl"])


def test_vector_of_a_schema_is_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text(SCHEMA.to_toml())

    assert Schema.load(tmp_path / "a.toml") == SCHEMA == Schema.load(tmp_path / "b.toml")
    assert SCHEMA.vectors == {"item.emb": 3}
    assert (SCHEMA.num_dense, SCHEMA.features[1:4]) == (
        4,
        ("item.emb[0]", "item.emb[1]", "item.emb[2]"),
    )
    assert "width = 3" in SCHEMA.to_toml()
    assert Schema.from_dict(SCHEMA.to_dict()) == SCHEMA
    for width in (0, True, "3", 10**9):
        with pytest.raises(SchemaError, match=rf"'x': width is {width!r}, expected a whole number"):
            Schema.from_dict(
                {"hash_version": 1, "slots": ["s"], "dense": [{"name": "x", "width": width}]}
            )


@formats
def test_lists_of_files_are_dense_columns(tmp_path: Path, suffix: str) -> None:
    assert read(write(tmp_path, suffix, ROWS)) == EXPECTED


@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_tables_are_dense_columns(kind: pa.DataType) -> None:
    assert read(table(ROWS, kind)) == EXPECTED
    assert read(table([*ROWS, *ROWS], kind)[2:7]) == [*EXPECTED[2:], *EXPECTED[:3]]
    assert read(ROWS) == EXPECTED


@formats
@pytest.mark.parametrize("emb", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], []])
def test_list_of_another_length_is_a_malformed_row(
    tmp_path: Path, suffix: str, emb: list[float]
) -> None:
    path = write(tmp_path, suffix, [*ROWS[:2], {**ROWS[0], "item": {"emb": emb}}, *ROWS[2:]])

    fault = rf"3: column 'item\.emb' is a list of {len(emb)} numbers, expected 3"
    if suffix == "jsonl":
        fault = r":3: column 'item\.emb' is .*, expected a list of 3 numbers"
    with pytest.raises(BadRowError, match=fault):
        read(path)
    assert read(path, bad_row_limit=1) == EXPECTED


@formats
def test_converted_vectors_are_columns_of_their_numbers(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix, ROWS)

    (converted,) = convert([str(path)], tmp_path / "out", SCHEMA).files

    np.testing.assert_array_equal(read(converted), EXPECTED)


def test_other_lists_are_no_vector() -> None:
    texts = table(ROWS).set_column(3, "item.emb", pa.array([["a", "b", "c"]] * 4))

    with pytest.raises(DataError, match=r"no column 'item\.emb\[0\]', .*did you mean 'item\.emb'"):
        read(texts)
