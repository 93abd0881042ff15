"""Hour and weekday of a time by dotted names, and labels of a least value, in every format with names."""

import json
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, feather, orc

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema, SchemaError
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.formats import values_of_files
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.sources import opened
from tests.reference.features import key_of

SCHEMA = Schema(
    dense=(DenseColumn(name="t.hour", missing=-1.0),), slots=("t.hour", "t.weekday"), label="click"
)
# 2026-11-28 is a Saturday. Hour and weekday (Monday is 0) in UTC of times as ISO text.
TIMES = {
    "2026-11-28T13:05:00": (13, 5),
    "2026-11-28 23:59:59.999999": (23, 5),
    "2026-11-30T00:00:00Z": (0, 0),
    "2026-11-29T23:30:00-02:00": (1, 0),
    "2026-11-30T00:30:00+05:30": (19, 6),
    "1969-12-31T23:00:00+00:00": (23, 2),
    "2024-02-29": (0, 3),
    "": None,
}


def read(data: Any, **options: Any) -> tuple[Batch, QueueDataset]:
    files, format = opened(data, SCHEMA, None)
    dataset = QueueDataset(SCHEMA, batch_size=100, format=format, **options)
    dataset.set_filelist(files)
    return joined(list(dataset)), dataset


def require(rows: Batch, parts: list[tuple[int, int] | None]) -> None:
    assert rows.dense[:, 0].tolist() == [-1 if part is None else part[0] for part in parts]
    texts = [["", ""] if part is None else [str(each) for each in part] for part in parts]
    expected = [key_of(slot, text.encode()) for row in texts for slot, text in enumerate(row, 1)]
    assert rows.keys.tolist() == expected


def write(folder: Path, suffix: str, column: pa.Array) -> Path:
    path = folder / f"rows{suffix}"
    table = pa.table({"t": column, "click": pa.array([0] * len(column), pa.int8())})
    match suffix:
        case ".parquet":
            pq.write_table(table, path)
        case ".orc":
            orc.write_table(table, str(path))
        case ".feather":
            feather.write_feather(table, path)
        case ".csv":
            csv.write_csv(table, path)
        case ".jsonl":
            lines = [json.dumps({"t": text or None, "click": 0}) for text in column.to_pylist()]
            path.write_text("".join(f"{line}\n" for line in lines))
        case _:
            words = [f"t:{text.replace(' ', 'T')} click:0\n" for text in column.to_pylist()]
            path.write_text("".join(words))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".paddlerec", ".parquet", ".orc", ".feather"])
def test_text_gives_hour_and_weekday_in_utc(tmp_path: Path, suffix: str) -> None:
    rows, _ = read(str(write(tmp_path, suffix, pa.array(TIMES))))

    require(rows, list(TIMES.values()))


@pytest.mark.parametrize("suffix", [".parquet", ".orc", ".feather"])
@pytest.mark.parametrize("zone", [None, "UTC", "America/New_York"])
@pytest.mark.parametrize("unit", ["ms", "us"])
def test_timestamps_give_them_in_utc_too(
    tmp_path: Path, suffix: str, zone: str | None, unit: str
) -> None:
    times = [
        datetime(2026, 11, 30, 2, 30, tzinfo=UTC),
        None,
        datetime(1969, 12, 31, 23, tzinfo=UTC),
    ]
    column = pa.array([t and t.replace(tzinfo=None) for t in times], pa.timestamp(unit))
    if zone:
        column = column.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit, zone))

    path = str(write(tmp_path, suffix, column))
    rows, _ = read(path)

    require(rows, [(2, 0), None, (23, 2)])
    assert values_of_files([path], SCHEMA, None).meaning("t.hour").whole_number == "digits"


def test_rows_in_memory_and_fields_of_structs_have_them(tmp_path: Path) -> None:
    zone = timezone(timedelta(hours=-3))
    times = [datetime(2026, 11, 29, 22, tzinfo=zone), None]
    rows, _ = read([{"t": time, "click": 0} for time in times])
    require(rows, [(1, 0), None])

    schema = Schema(dense=(), slots=("request.t.weekday", "request.t.hour"), label="click")
    struct = pa.StructArray.from_arrays([pa.array(times, pa.timestamp("s", "UTC"))], ["t"])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"request": struct, "click": [0, 1]}), path)
    dataset = QueueDataset(schema, batch_size=100)
    dataset.set_filelist([path])
    assert joined(list(dataset)).keys.tolist() == [
        key_of(slot, text) for slot, text in [(1, b"0"), (2, b"1"), (1, b""), (2, b"")]
    ]


def test_days_have_a_weekday_and_no_hour(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", pa.array([date(2026, 11, 28), None]))
    dataset = QueueDataset(Schema(dense=(), slots=("t.weekday",), label="click"), batch_size=9)
    dataset.set_filelist([path])
    assert joined(list(dataset)).keys.tolist() == [key_of(1, b"5"), key_of(1, b"")]

    with pytest.raises(DataError, match=r"no column 't\.hour', which the schema requires"):
        read(str(path))


def test_columns_of_other_types_have_none(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", pa.array([1_600_000_000, 5]))
    with pytest.raises(DataError, match=r"no column 't\.hour', which the schema requires"):
        read(str(path))
    path = write(tmp_path, ".parquet", pa.array([datetime(2026, 11, 28), None]))
    with pytest.raises(DataError, match=r"no column 't >= 4', the label of the schema"):
        labels_of(path, "t >= 4", slot="click")
    path = write(tmp_path, ".parquet", pa.nulls(2))
    require(read(str(path))[0], [None, None])


def test_a_column_of_that_name_is_read_as_it_is() -> None:
    rows, _ = read([{"t": "2026-11-28", "t.hour": 7, "click": 0}])

    require(rows, [(7, 5)])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_text_that_is_no_time_makes_a_malformed_row(tmp_path: Path, suffix: str) -> None:
    column = pa.array(["2026-11-28", "yesterday", "2026-02-30"])
    rows, dataset = read(str(write(tmp_path, suffix, column)), bad_row_limit=2)

    require(rows, [(0, 5)])
    assert dataset.bad_rows == 2
    assert dataset._reading is not None
    fault = "column 't' is 'yesterday', expected a time: 2026-11-28T13:05:00Z"
    assert dataset._reading.bad_rows.first.endswith(fault)


def labels_of(
    path: Path, label: str, slot: str = "user", **options: Any
) -> tuple[list[float], str]:
    dataset = QueueDataset(Schema(dense=(), slots=(slot,), label=label), 100, **options)
    dataset.set_filelist([path])
    rows = joined(list(dataset))
    assert rows.labels is not None
    assert dataset._reading is not None
    return rows.labels.tolist(), dataset._reading.bad_rows.first


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".paddlerec", ".parquet"])
@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("rating >= 4", [1, 0, 1, 0]),
        ("rating>4", [0, 0, 1, 0]),
        ("rating >= 3.5", [1, 1, 1, 0]),
        ("rating > -1", [1, 1, 1, 1]),
    ],
)
def test_a_label_is_1_from_a_least_value_on(
    tmp_path: Path, suffix: str, label: str, expected: list[int]
) -> None:
    ratings = [4, 3.5, 5, 1]
    path = tmp_path / f"rows{suffix}"
    table = pa.table({"rating": ratings, "user": ["a", "b", "c", "d"]})
    match suffix:
        case ".csv":
            csv.write_csv(table, path)
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".parquet":
            pq.write_table(table, path)
        case _:
            path.write_text("".join(f"user:a rating:{rating}\n" for rating in ratings))

    assert labels_of(path, label) == (expected, "")


def test_rows_without_a_rating_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("rating,user\n5,a\n,b\ngood,c\n")

    labels, first = labels_of(path, "rating >= 4", bad_row_limit=2)

    assert labels == [1]
    assert first == f"{path}:3: the label is missing, expected 0 or 1"
    path.write_text("rating,user\n5,a\ngood,c\n")
    _, first = labels_of(path, "rating >= 4", bad_row_limit=2)
    assert first == f"{path}:3: column 'rating' is 'good', expected a number"


def test_the_number_of_a_label_is_no_feature() -> None:
    with pytest.raises(SchemaError, match="'rating >= 4' is the label and a feature"):
        Schema(dense=(DenseColumn(name="rating"),), slots=("user",), label="rating >= 4")
