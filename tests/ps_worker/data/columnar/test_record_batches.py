"""What holds for all formats with named columns: the same rows from each, labels, faults, splits, offsets."""

import csv
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import orc

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, Reader
from ctr_ps.ps_worker.data.columnar import record_batches
from ctr_ps.ps_worker.data.columnar.column_matching import LABEL_NAMES
from ctr_ps.ps_worker.data.files.file_split import FileSplit, split_evenly
from ctr_ps.ps_worker.data.formats import reader_of
from tests.reference.features import key_of

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0, missing=-1.0), DenseColumn(name="hits")),
    slots=("user", "item", "place"),
)
ROWS: dict[str, list[object]] = {
    "place": ["", None, "café", "x" * 30],
    "label": [1, 0, 0, 1],
    "ignored": [b"\xff", None, b"", b"a"],
    "item": ["12345678", "123456789", None, "68fd1e64"],
    "hits": [None, 2, -3, 4],
    "user": ["7", "07", "-7", ""],
    "age": [1.5, None, 1e3, 0.25],
}
FORMATS = ("csv", "parquet", "orc")


def write(path: Path, table: pa.Table, rows_per_unit: int = 1000) -> str:
    """Writes in the format of the suffix; units are row groups or stripes."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows_per_unit)
    elif path.suffix == ".orc":
        with orc.ORCWriter(str(path), stripe_size=1, batch_size=rows_per_unit) as writer:
            for start in range(0, max(len(table), 1), rows_per_unit):
                writer.write(table[start : start + rows_per_unit])
    else:
        path.write_bytes(csv_text(table))
    return str(path)


def csv_text(table: pa.Table) -> bytes:
    """Returns the columns of numbers and valid text as CSV with a header."""
    columns = {
        name: [value if value is not None else "" for value in table[name].to_pylist()]
        for name in table.column_names
        if name != "ignored"
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode()


def reader(path: str, bad_row_limit: int = 0, schema: Schema = SCHEMA) -> Reader:
    return reader_of(path, schema, BadRows(bad_row_limit))


def read(path: str, offset: int | None = None, schema: Schema = SCHEMA) -> list[Block]:
    return list(reader(path, 100, schema).blocks(FileSplit(path), offset))


def rows_of(blocks: Sequence[Block]) -> list[tuple[object, ...]]:
    return [row for block in blocks for row in rows_of_batch(block.rows)]


def rows_of_batch(batch: Batch) -> Iterator[tuple[object, ...]]:
    for row in range(batch.size):
        bounds = batch.offsets[row * batch.num_slots : (row + 1) * batch.num_slots + 1].tolist()
        keys = [batch.keys[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        label = None if batch.labels is None else float(batch.labels[row])
        yield label, batch.dense[row].tolist(), keys


def numbered(size: int) -> pa.Table:
    return pa.table(
        {
            "label": [row % 2 for row in range(size)],
            "age": [float(row) for row in range(size)],
            "hits": list(range(size)),
            **{slot: [f"{slot}{row}" for row in range(size)] for slot in SCHEMA.slots},
        }
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_rows_have_labels_scaled_numbers_and_keys_in_the_order_of_the_schema(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", pa.table(ROWS))

    (block,) = read(path)

    batch = block.rows
    assert batch.labels is not None
    assert batch.labels.tolist() == [1, 0, 0, 1]
    assert batch.dense.tolist() == [[0.25, 0], [-1, 2], [499.5, -3], [-0.375, 4]]
    expected = [
        key_of(slot, str(ROWS[name][row] or "").encode())
        for row in range(4)
        for slot, name in enumerate(SCHEMA.slots, start=1)
    ]
    assert batch.keys.tolist() == expected
    assert batch.offsets.tolist() == list(range(13))
    arrays = (batch.labels, batch.dense, batch.keys, batch.offsets)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "uint64", "int32"]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("name", [*LABEL_NAMES, None])
def test_label_is_found_by_its_usual_names(tmp_path: Path, suffix: str, name: str | None) -> None:
    table = pa.table(ROWS)
    names = [name or "other" if column == "label" else column for column in table.column_names]
    path = write(tmp_path / f"a.{suffix}", table.rename_columns(names))

    (block,) = read(path)

    labels = block.rows.labels
    assert (
        labels is None if name is None else labels is not None and labels.tolist() == [1, 0, 0, 1]
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_label_is_the_column_that_the_schema_names(tmp_path: Path, suffix: str) -> None:
    """Whatever it is called, and although there are columns with usual names."""
    table = pa.table(ROWS).append_column("bought", pa.array([0, 1, 1, 0]))
    path = write(tmp_path / f"a.{suffix}", table)

    (block,) = read(path, schema=replace(SCHEMA, label="bought"))

    assert block.rows.labels is not None
    assert block.rows.labels.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("suffix", FORMATS)
def test_label_that_is_not_there_is_an_error_unless_it_may_be_absent(
    tmp_path: Path, suffix: str
) -> None:
    """The usual names do not stand in for it: their values may mean something else."""
    path = write(tmp_path / f"a.{suffix}", pa.table(ROWS))
    schema = replace(SCHEMA, label="labels")

    with pytest.raises(
        DataError,
        match=rf"a\.{suffix}: no column 'labels', the label of the schema, did you mean 'label'",
    ):
        read(path, schema=schema)
    (block,) = read(path, schema=replace(schema, is_for_prediction=True))
    assert block.rows.labels is None


@pytest.mark.parametrize("suffix", FORMATS)
def test_weights_are_read_and_ids_only_to_predict(tmp_path: Path, suffix: str) -> None:
    table = pa.table(ROWS).append_column("w", pa.array([0.5, 0, 3, 1e-3]))
    table = table.append_column("row", pa.array([7, 8, -9, 10**12]))
    path = write(tmp_path / f"a.{suffix}", table)
    schema = replace(SCHEMA, weight="w", id="row")

    (block,) = read(path, schema=schema)
    (named,) = read(path, schema=replace(schema, is_for_prediction=True))

    assert block.rows.weights is not None
    np.testing.assert_array_equal(block.rows.weights, np.float32([0.5, 0, 3, 1e-3]))
    assert block.rows.ids is None
    assert named.rows.ids is not None
    assert named.rows.ids.tolist() == ["7", "8", "-9", "1000000000000"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_weights_may_be_absent_from_data_to_predict_and_ids_not(
    tmp_path: Path, suffix: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", pa.table(ROWS))
    weighted = replace(SCHEMA, weight="weigth")

    with pytest.raises(DataError, match="no column 'weigth', the weight of the schema"):
        read(path, schema=weighted)
    assert read(path, schema=replace(weighted, is_for_prediction=True))[0].rows.weights is None
    with pytest.raises(DataError, match="no column 'usr', the id of the schema"):
        read(path, schema=replace(SCHEMA, id="usr", is_for_prediction=True))


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_slot_may_be_the_id(tmp_path: Path, suffix: str) -> None:
    values = ["a", "b\u00e9", "c", "d"]
    path = write(tmp_path / f"a.{suffix}", pa.table(ROWS | {"user": values}))

    (block,) = read(path, schema=replace(SCHEMA, id="user", is_for_prediction=True))

    assert block.rows.ids is not None
    assert block.rows.ids.tolist() == values
    assert block.rows.keys[: len(SCHEMA.slots)][0] == key_of(1, b"a")


@pytest.mark.parametrize(
    ("column", "kind"), [("weight", pa.string()), ("id", pa.float64()), ("id", pa.list_(pa.int8()))]
)
def test_type_that_cannot_be_a_weight_or_id_is_refused(
    tmp_path: Path, column: str, kind: pa.DataType
) -> None:
    values = pa.array([None] * 4, kind)
    path = write(tmp_path / "a.parquet", pa.table(ROWS).append_column("x", values))

    with pytest.raises(DataError, match="column 'x' is of type"):
        read(path, schema=replace(SCHEMA, is_for_prediction=True, **{column: "x"}))


def test_column_of_the_schema_is_no_label(tmp_path: Path) -> None:
    schema = Schema(dense=(DenseColumn(name="label"),), slots=("user",))
    path = write(tmp_path / "a.parquet", pa.table(ROWS))

    (block,) = read(path, schema=schema)

    assert block.rows.labels is None
    assert block.rows.dense[:, 0].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("suffix", FORMATS)
def test_column_that_is_there_twice_is_refused(tmp_path: Path, suffix: str) -> None:
    if suffix == "csv":
        (tmp_path / "a.csv").write_text("user,age,hits,user,item,place\n1,2,3,4,5,6\n")
    else:
        table = pa.table(ROWS).drop_columns("ignored")
        write(tmp_path / f"a.{suffix}", table.append_column("user", table["user"]))

    with pytest.raises(DataError, match="column 'user' occurs twice"):
        read(str(tmp_path / f"a.{suffix}"))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("column", "values", "fault"),
    [
        ("label", [1, 2, 0, 1], "the label is '?2'?, expected 0 or 1"),
        ("label", [1, None, 0, 1], "the label is missing, expected 0 or 1"),
        ("label", [1.0, 0.5, 0.0, 1.0], "the label is '?0.5'?, expected 0 or 1"),
        ("age", [1.5, math.inf, 1e3, 0.25], "column 'age' is '?inf'?, expected a finite number"),
        ("age", [1.5, -math.inf, 1e3, 0.25], "column 'age' is '?-inf'?, expected a finite number"),
        ("age", [1.5, 1e39, 1e3, 0.25], r"column 'age' is 1e\+39, beyond the range of float32"),
        (
            "age",
            [1.5, -1e300, 1e3, 0.25],
            r"column 'age' is -1e\+300, beyond the range of float32",
        ),
    ],
)
def test_malformed_row_is_left_out_and_named(
    tmp_path: Path, suffix: str, column: str, values: list[object], fault: str
) -> None:
    table = pa.table(ROWS | {column: values})
    path = write(tmp_path / f"a.{suffix}", table)
    place = "3" if suffix == "csv" else "row 2"

    with pytest.raises(
        BadRowError, match=rf"a\.{suffix}:{place}: {fault}; this is malformed row 1"
    ):
        list(reader(path).blocks(FileSplit(path)))
    good = pa.table(ROWS).take([0, 2, 3])
    expected = rows_of(read(write(tmp_path / f"b.{suffix}", good)))
    assert rows_of(read(path)) == expected


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("column", "values", "fault"),
    [
        (
            "weight",
            [1, -0.5, 1, 1],
            "the weight is '?-0.5'?, expected a finite number of at least 0",
        ),
        ("weight", [1.5, math.inf, 1, 1], "the weight is '?inf'?, expected"),
        ("weight", [1.5, 1e300, 1, 1], "the weight is '?1e\\+300'?, expected"),
        ("weight", [1.5, None, 1, 1], "the weight is missing, expected"),
        ("id", ["a", None, "b", "c"], "the id is missing, expected UTF-8"),
        ("id", ["a", "b\tc", "b", "c"], r"the id is 'b\\tc', expected UTF-8"),
    ],
)
def test_row_with_a_malformed_weight_or_id_is_left_out_and_named(
    tmp_path: Path, suffix: str, column: str, values: list[object], fault: str
) -> None:
    path = write(tmp_path / f"a.{suffix}", pa.table(ROWS | {"x": values}))
    schema = replace(SCHEMA, is_for_prediction=True, **{column: "x"})

    with pytest.raises(BadRowError, match=fault):
        list(reader(path, schema=schema).blocks(FileSplit(path)))
    assert sum(block.rows.size for block in read(path, schema=schema)) == 3


@pytest.mark.parametrize("values", [[True, False], [1.0, 0.0], np.array([1, 0], np.uint64)])
def test_label_is_any_kind_of_0_and_1(tmp_path: Path, values: Sequence[object]) -> None:
    table = pa.table(ROWS)[:2]
    table = table.set_column(1, "label", pa.array(values))

    (block,) = read(write(tmp_path / "a.parquet", table))

    assert block.rows.labels is not None
    assert block.rows.labels.tolist() == [1, 0]


@pytest.mark.parametrize("suffix", ["parquet", "orc"])
@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("user", [1.5, 2.0], "column 'user' is of type double.*for slot 1: write it as text"),
        ("user", [True, False], "column 'user' is of type bool"),
        ("user", [[0.5], []], r"column 'user' is of type list<.*double>"),
        ("age", ["1", "2"], "column 'age' is of type string, expected numbers"),
        ("label", [[1], [0]], r"column 'label' is of type list<.*>, expected numbers"),
    ],
)
def test_column_of_a_wrong_type_is_refused(
    tmp_path: Path, suffix: str, column: str, values: list[object], message: str
) -> None:
    table = pa.table(ROWS)[:2]
    table = table.set_column(table.column_names.index(column), column, pa.array(values))
    path = write(tmp_path / f"a.{suffix}", table)

    with pytest.raises(DataError, match=rf"a\.{suffix}: {message}"):
        read(path)


@pytest.mark.parametrize("suffix", ["parquet", "orc"])
def test_lists_are_any_number_of_keys(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_batches, "BLOCK_ROWS", 2)
    table = pa.table(ROWS)
    items: list[list[str | None] | None] = [["a", "b"], [], None, ["c", None, "d"]]
    table = table.set_column(table.column_names.index("item"), "item", pa.array(items))
    path = write(tmp_path / f"a.{suffix}", table, rows_per_unit=3)

    keys = [row[2] for row in rows_of(read(path))]

    expected = [[""] if row is None else [value or "" for value in row] for row in items]
    assert [row[1] for row in keys] == [[key_of(2, v.encode()) for v in row] for row in expected]
    assert [row[0] for row in keys] == [[key_of(1, str(v).encode())] for v in ROWS["user"]]


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("rows_per_unit", [1, 7, 1000])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 50, 200])
def test_splits_hold_every_row_once(
    tmp_path: Path, suffix: str, rows_per_unit: int, num_splits: int
) -> None:
    path = write(tmp_path / f"a.{suffix}", numbered(50), rows_per_unit)

    splits = reader(path).splits(path, num_splits)

    assert 1 <= len(splits) <= num_splits
    found = [row for split in splits for row in rows_of(list(reader(path).blocks(split)))]
    assert found == rows_of(read(path))
    assert len(found) == 50


@pytest.mark.parametrize("suffix", ["parquet", "orc"])
def test_offset_is_the_number_of_a_row(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", numbered(20), rows_per_unit=6)
    all_rows = rows_of(read(path))

    assert [block.offset for block in read(path)] == [0, 6, 12, 18]
    assert [block.offset for block in read(path, 8)] == [8, 12, 18]
    for offset in range(21):
        assert rows_of(read(path, offset)) == all_rows[offset:]


@pytest.mark.parametrize("suffix", FORMATS)
def test_blocks_are_bounded(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", numbered(10_000), rows_per_unit=10_000)

    sizes = [block.rows.size for block in read(path)]

    assert max(sizes) <= record_batches.BLOCK_ROWS
    assert sum(sizes) == 10_000


@pytest.mark.parametrize("suffix", FORMATS)
def test_url_is_read_as_a_local_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", numbered(20), rows_per_unit=6)
    url = f"memory://columnar/a.{suffix}"
    with fsspec.open(url, "wb") as file:
        file.write(Path(path).read_bytes())

    splits = reader(url).splits(url, 2)

    assert len(splits) == 2
    assert rows_of(read(url)) == rows_of(read(path))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 25))
def test_cut_covers_all_in_ranges_that_are_not_empty(sizes: list[int], num_splits: int) -> None:
    ranges = split_evenly(sizes, num_splits)

    assert 1 <= len(ranges) <= num_splits
    assert [index for start, stop in ranges for index in range(start, stop)] == list(
        range(len(sizes))
    )
    assert all(start < stop for start, stop in ranges)


def test_cut_is_even() -> None:
    assert split_evenly([1] * 8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert split_evenly([10, 1, 1, 1, 1, 6], 2) == [(0, 1), (1, 6)]
