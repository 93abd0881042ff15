"""Conversion to Parquet: the same rows as text and as keys, atomic files, invalid input."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, CtrPsError, DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.extras.data_tools.convert import Converted, convert

SCHEMA = Schema(
    dense=(DenseColumn(name="age", transform="log1p", missing=-1.0),), slots=("user", "item")
)
LINES = ["1\t7\talice\tbook", "0\t\t\tpen", "0\t-3\tcafé\t", '1\t2147483648\t"q"\ta,b']


def write(path: Path, lines: list[str] = LINES) -> str:
    text = "".join(line + "\n" for line in lines).encode(errors="surrogateescape")
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def rows(files: list[Path] | list[str], schema: Schema = SCHEMA) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for path in map(str, files):
        for block in reader_of(path, schema, BadRows()).blocks(FileSplit(path)):
            batch = block.rows
            labels = [None] * batch.size if batch.labels is None else batch.labels.tolist()
            keys = batch.keys.reshape(batch.size, -1).tolist()
            found += zip(labels, batch.dense.tolist(), keys, strict=True)
    return found


@pytest.mark.parametrize("keys", [False, True], ids=["text", "keys"])
@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_rows_stay_as_they_were(tmp_path: Path, keys: bool, name: str) -> None:
    path = write(tmp_path / name)

    converted = convert([path], tmp_path / "out", SCHEMA, keys=keys)

    assert converted == Converted([tmp_path / "out" / "part-00000.parquet"], 4, 0)
    assert rows(converted.files) == rows([path])


@pytest.mark.parametrize("keys", [False, True], ids=["text", "keys"])
@pytest.mark.parametrize("lines", [LINES, [line[2:] for line in LINES]], ids=["", "unlabelled"])
def test_label_gets_the_name_that_the_schema_gives_it(
    tmp_path: Path, keys: bool, lines: list[str]
) -> None:
    path = write(tmp_path / "a.tsv", lines)
    schema = replace(SCHEMA, label="bought")
    has_labels = lines is LINES

    files = convert([path], tmp_path / "out", schema, keys=keys).files

    assert ("bought" in pq.read_schema(files[0]).names) == has_labels
    assert rows(files, replace(schema, is_for_prediction=not has_labels)) == rows([path])


def test_text_is_text_and_numbers_are_not_scaled(tmp_path: Path) -> None:
    (path,) = convert([write(tmp_path / "a.tsv")], tmp_path / "out", SCHEMA).files

    table = pq.read_table(path)
    assert table.schema.types == [pa.int8(), pa.float64(), pa.string(), pa.string()]
    assert table.to_pydict() == {
        "label": [1, 0, 0, 1],
        "age": [7, None, -3, 2147483648],
        "user": ["alice", None, "café", '"q"'],
        "item": ["book", "pen", None, "a,b"],
    }


def test_file_of_keys_says_what_they_were_made_for(tmp_path: Path) -> None:
    (path,) = convert([write(tmp_path / "a.tsv")], tmp_path / "out", SCHEMA, keys=True).files

    file = pq.ParquetFile(path)
    assert file.schema_arrow.types == [pa.int8(), pa.float32(), pa.uint64(), pa.uint64()]
    metadata = file.schema_arrow.metadata
    assert metadata[b"ctr_ps.hash_version"] == b"1"
    assert metadata[b"ctr_ps.slots"] == b'["user", "item"]'
    assert metadata[b"ctr_ps.schema_fingerprint"].decode() == SCHEMA.fingerprint
    assert file.read()["age"].to_pylist() == [7, None, -3, 2147483648]


def test_other_scaling_may_read_the_keys_and_another_order_may_not(tmp_path: Path) -> None:
    files = convert([write(tmp_path / "a.tsv")], tmp_path / "out", SCHEMA, keys=True).files
    other_scaling = Schema(dense=(DenseColumn(name="age", scale=2.0),), slots=SCHEMA.slots)

    assert rows(files, other_scaling) == rows([tmp_path / "a.tsv"], other_scaling)
    with pytest.raises(DataError, match="'item' is slot 1 of the schema, but keys were hashed"):
        rows(files, Schema(dense=SCHEMA.dense, slots=("item", "user")))


@pytest.mark.parametrize(
    ("rows_per_file", "row_group_rows", "groups"),
    [
        (1000, 1000, [[10]]),
        (1000, 4, [[4, 4, 2]]),
        (4, 1000, [[4], [4], [2]]),
        (5, 2, [[2, 2], [2, 2], [2]]),
        (1, 1, [[1]] * 10),
    ],
)
def test_files_and_row_groups_have_the_rows_asked_for(
    tmp_path: Path, rows_per_file: int, row_group_rows: int, groups: list[list[int]]
) -> None:
    sources = [write(tmp_path / "a.tsv", LINES * 2), write(tmp_path / "b.tsv", LINES[:2])]

    converted = convert(
        sources,
        tmp_path / "out",
        SCHEMA,
        rows_per_file=rows_per_file,
        row_group_rows=row_group_rows,
    )

    metadata = [pq.ParquetFile(path).metadata for path in converted.files]
    assert [[m.row_group(i).num_rows for i in range(m.num_row_groups)] for m in metadata] == groups
    assert rows(converted.files) == rows(sources)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"part-{index:05d}.parquet" for index in range(len(groups))
    ]


@pytest.mark.parametrize("suffix", ["csv", "orc", "parquet"])
@pytest.mark.parametrize("keys", [False, True], ids=["text", "keys"])
def test_other_formats_are_converted_too(tmp_path: Path, suffix: str, keys: bool) -> None:
    source = tmp_path / "source" / f"a.{suffix}"
    source.parent.mkdir()
    table = pa.table(
        {"item": ["x", "", "7"], "click": [1, 0, 1], "user": [1, 2, 3], "age": [0.5, 2.0, None]}
    )
    if suffix == "csv":
        source.write_text("item,click,user,age\nx,1,1,0.5\n,0,2,2\n7,1,3,\n")
    elif suffix == "orc":
        pa.orc.write_table(table, source)
    else:
        pq.write_table(table, source)

    converted = convert([str(source)], tmp_path / "out", SCHEMA, keys=keys)

    assert rows(converted.files) == rows([source])


@pytest.mark.parametrize("keys", [False, True], ids=["text", "keys"])
def test_lists_stay_lists(tmp_path: Path, keys: bool) -> None:
    source = tmp_path / "a.parquet"
    items = [["a", "b"], [], None, ["c", None]]
    pq.write_table(pa.table({"age": [1.0] * 4, "user": ["u"] * 4, "item": items}), source)

    (path,) = convert([str(source)], tmp_path / "out", SCHEMA, keys=keys).files

    def keys_of(file: Path) -> tuple[list[int], list[int]]:
        (block,) = reader_of(str(file), SCHEMA, BadRows()).blocks(FileSplit(str(file)))
        return block.rows.keys.tolist(), block.rows.offsets.tolist()

    assert keys_of(path) == keys_of(source)


def test_keys_can_be_converted_again_but_not_to_text(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv")
    (keys,) = convert([source], tmp_path / "keys", SCHEMA, keys=True).files

    again = convert([str(keys)], tmp_path / "again", SCHEMA, keys=True)

    assert rows(again.files) == rows([source])
    with pytest.raises(UsageError, match=r"part-00000\.parquet: the file contains keys"):
        convert([str(keys)], tmp_path / "text", SCHEMA)


def test_malformed_rows_are_left_out_up_to_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [*LINES[:2], "bad", "2\t1\ta\tb", *LINES[2:]])

    converted = convert([path], tmp_path / "out", SCHEMA, bad_row_limit=2)

    assert (converted.rows, converted.bad_rows) == (4, 2)
    assert rows(converted.files) == rows([write(tmp_path / "good.tsv")])
    with pytest.raises(BadRowError, match=r"a\.tsv:4: the label is '2'"):
        convert([path], tmp_path / "out2", SCHEMA, bad_row_limit=1)
    assert list((tmp_path / "out2").iterdir()) == []


def test_number_beyond_float32_is_malformed_where_numbers_are_written_as_such(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("click,age,user,item\n1,7,a,b\n0,-1e39,a,b\n0,,a,b\n1,3.4028235e38,a,b\n")

    as_text = convert([str(path)], tmp_path / "text", SCHEMA)
    with pytest.raises(
        BadRowError, match=r"a\.csv:3: column 'age' is -1e\+39, beyond the range of"
    ):
        convert([str(path)], tmp_path / "none", SCHEMA, keys=True)
    as_keys = convert([str(path)], tmp_path / "keys", SCHEMA, keys=True, bad_row_limit=1)

    text, keys = (pq.read_table(each.files[0])["age"].to_pylist() for each in (as_text, as_keys))
    assert (as_text.rows, as_keys.rows, as_keys.bad_rows) == (4, 3, 1)
    assert text == [7.0, -1e39, None, 3.4028235e38]
    assert keys == [7.0, None, float(np.finfo(np.float32).max)]


def test_bytes_that_are_no_text_need_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", [LINES[0], "1\t2\t\udcff\titem", LINES[1]])

    with pytest.raises(BadRowError, match=r"a\.tsv:offset 15: 'user' is '\\\\xff', expected UTF-8"):
        convert([path], tmp_path / "none", SCHEMA)
    text = convert([path], tmp_path / "text", SCHEMA, bad_row_limit=1)
    keys = convert([path], tmp_path / "keys", SCHEMA, keys=True)

    assert rows(text.files) == [rows([path])[0], rows([path])[2]]
    assert rows(keys.files) == rows([path])


def test_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv", [*LINES, *LINES, "bad"])

    with pytest.raises(BadRowError):
        convert([source], tmp_path / "out", SCHEMA, rows_per_file=4, row_group_rows=4)

    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows_per_file": 0}, UsageError, "rows_per_file is 0, expected at least 1"),
        ({"row_group_rows": 0}, UsageError, "row_group_rows is 0, expected at least 1"),
        ({"format_in": "libsvm"}, UsageError, "cannot read single columns of format 'libsvm', only"),
        ({"files": ["empty.tsv"]}, DataError, "no rows to convert in 1 file"),
        ({"files": ["a.tsv", "b.tsv"]}, DataError, r"b\.tsv has columns age: .*convert them separately"),
        ({"files": ["none.tsv"]}, DataError, r"cannot read .*none\.tsv"),
        ({"out_dir": "a.tsv"}, DataError, r"cannot write to .*a\.tsv"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, arguments: dict[str, object], error: type[CtrPsError], message: str
) -> None:
    write(tmp_path / "empty.tsv", [])
    write(tmp_path / "a.tsv")
    write(tmp_path / "b.tsv", [line[2:] for line in LINES])
    names = arguments.pop("files", ["a.tsv"])
    assert isinstance(names, list)
    out_dir = tmp_path / str(arguments.pop("out_dir", "out"))

    with pytest.raises(error, match=message):
        convert([str(tmp_path / name) for name in names], out_dir, SCHEMA, **arguments)  # type: ignore[arg-type]


def test_folder_with_parquet_in_it_is_left_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "a.tsv")
    convert([source], tmp_path / "out", SCHEMA)

    with pytest.raises(UsageError, match="already has Parquet files: choose another folder"):
        convert([source], tmp_path / "out", SCHEMA)
