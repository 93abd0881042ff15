"""Bad files of every format, as datasets read them: skipped and counted, or an error that names them."""

import logging
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, CtrPsError, DataError
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from tests.reference.features import key_of
from tests.support.formats import (
    FILE_FORMATS,
    NUM_DENSE,
    ROWS,
    SCHEMA,
    Kind,
    Row,
    batch_of,
    dataset_of,
    formats,
    kinds,
    rows_of,
    write,
    write_text,
)
from tests.support.rows import assert_same_rows

COLUMNAR = ("parquet", "orc", "arrow", "keys")
BAD = Row(7, (1, 2), ("a", "b", "c"))

formats_that_skip = pytest.mark.parametrize(
    "name", [name for name, each in FILE_FORMATS.items() if each.skips_bad_rows]
)


@formats_that_skip
@kinds
def test_row_with_a_wrong_label_is_skipped_and_reported_or_an_error(
    tmp_path: Path, name: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = write(tmp_path, name, [*rows[:3], BAD, rows[3], BAD])
    line = 5 if name == "csv" else 4
    place = f"row {line}" if name in COLUMNAR else str(line)

    with pytest.raises(
        BadRowError,
        match=rf"^{path}:{place}: .* is '?7'?, expected .*malformed row 1, and bad_row_limit is 0",
    ):
        rows_of(dataset_of(kind, name, [path]))
    with pytest.raises(BadRowError, match="malformed row 2, and bad_row_limit is 1"):
        rows_of(dataset_of(kind, name, [path], bad_row_limit=1))
    caplog.clear()
    dataset = dataset_of(kind, name, [path], bad_row_limit=2)
    actual = rows_of(dataset)

    assert_same_rows(batch_of(rows[:4]), actual)
    assert dataset.bad_rows == 2
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert [f"file={path} place={place}" in warning for warning in warnings] == [True, False, False]
    assert warnings[-1] == f"malformed rows skipped: bad_rows=2 rows=4 most in: {path} (2)"


@formats_that_skip
@kinds
@pytest.mark.parametrize("reader_num", [1, 3])
def test_malformed_row_is_logged_once_however_often_it_is_read(
    tmp_path: Path, name: str, kind: Kind, reader_num: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    bad = {"a": [BAD], "b": [BAD, BAD], "c": []}
    files = [write(tmp_path, name, [*rows, *bad[stem]], stem) for stem in bad]
    dataset = dataset_of(kind, name, files, bad_row_limit=3, reader_num=reader_num)

    for _ in range(3):
        assert rows_of(dataset).size == 3 * len(rows)
        assert dataset.bad_rows == 3

    said = [each for each in caplog.messages if each.startswith("skipped a malformed row")]
    assert len(said) == len(set(said)) == 3
    assert len([each for each in caplog.messages if "bad_rows=3" in each]) == 1


@formats_that_skip
@kinds
def test_first_malformed_rows_are_logged_and_no_more_in_later_passes(
    tmp_path: Path, name: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = write(tmp_path, name, [*rows, *[BAD] * 9])
    dataset = dataset_of(kind, name, [path], bad_row_limit=9)

    rows_of(dataset)
    rows_of(dataset)

    said = [each for each in caplog.messages if each.startswith("skipped a malformed row")]
    assert len(said) == len(set(said)) == 5
    # One too many is named by its place, though the log has said enough.
    last = len(rows) + 9 + (name == "csv")
    place = f"row {last}" if name in COLUMNAR else str(last)
    with pytest.raises(
        BadRowError, match=rf"^{path}:{place}: .*malformed row 9, and bad_row_limit is 8"
    ):
        rows_of(dataset_of(kind, name, [path], bad_row_limit=8))


@formats_that_skip
@kinds
def test_file_of_malformed_rows_alone_is_told_with_its_probable_cause(
    tmp_path: Path, name: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    good, other = write(tmp_path, name, rows, "a"), write(tmp_path, name, [BAD] * 9, "b")
    dataset = dataset_of(kind, name, [good, other], bad_row_limit=9)

    assert rows_of(dataset).size == len(rows)
    rows_of(dataset)
    (told,) = [each for each in caplog.messages if each.startswith("a file has no readable row")]
    with pytest.raises(BadRowError) as beyond:
        rows_of(dataset_of(kind, name, [good, other], bad_row_limit=4))
    with pytest.raises(DataError) as alone:
        rows_of(dataset_of(kind, name, [other], bad_row_limit=9))

    verdict = "all its 9 rows are malformed: the schema or the format is probably wrong"
    assert f"file={other}: {verdict}" in told
    assert f"malformed row 5, and bad_row_limit is 4; {verdict}" in str(beyond.value)
    assert str(alone.value).startswith(f"no rows in 1 file: {other} (9 malformed rows): the schema")
    for text in (told, str(beyond.value), str(alone.value)):
        assert re.search(
            rf"\(data\.schema, data\.format\); the first is {other}:\D*\d+: .* is '?7'?", text
        )


@formats_that_skip
@kinds
def test_file_with_a_good_row_behind_the_malformed_ones_is_of_its_schema(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = write(tmp_path, name, [*[BAD] * 3, *rows])

    with pytest.raises(BadRowError, match=r"malformed row 3, and bad_row_limit is 2$"):
        rows_of(dataset_of(kind, name, [path], bad_row_limit=2))


def with_line(name: str, rows: Sequence[Row], number: int, line: bytes) -> bytes:
    """Returns the text of rows and, as line `number` of it, counted from 1, another one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        FILE_FORMATS[name].write(path, rows, SCHEMA)
        lines = path.read_bytes().splitlines(keepends=True)
    return b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]])


@pytest.mark.parametrize("name", ["generator", "pipe"])
@pytest.mark.parametrize(
    ("line", "generator_message", "pipe_message"),
    [
        ("x\t1\t2\ta\tb\tc", ":2: 'click' has 'x'", "bad line 2, '2 1 2 1 a 1 b 1 c 1 x'.*'click'.* is 'x'"),
        ("1\t1\t2\ta\tb", ":2: the columns .* are .*, C2, expected .*, C3 as in", "bad line 2, .*'click'"),
    ],
)  # fmt: skip
def test_limit_of_malformed_rows_is_not_for_faults_of_code(
    tmp_path: Path, name: str, line: str, generator_message: str, pipe_message: str
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = tmp_path / "part.tsv"
    path.write_bytes(with_line(name, rows, 2, line.encode()))

    message = generator_message if name == "generator" else pipe_message
    with pytest.raises(DataError, match=rf"^{path}.*{message}"):
        rows_of(dataset_of(QueueDataset, name, [path], bad_row_limit=9))


@pytest.mark.parametrize("name", [name for name in FILE_FORMATS if name not in COLUMNAR])
def test_bytes_that_are_no_text_are_a_value_but_to_python(tmp_path: Path, name: str) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = tmp_path / f"part{FILE_FORMATS[name].suffix}"
    lines = {".csv": b"1,1,2,%s,b,c", ".ffm": b"1 0:0:1 1:0:2 2:%s:1 3:b:1 4:c:1"}
    lines |= {".multislot": b"2 1 2 1 %s 1 b 1 c 1 1"}
    lines |= {".paddlerec": b"label:1 I1:1 I2:2 C1:%s C2:b C3:c"}
    lines |= {".jsonl": b'{"label":1,"I1":1,"I2":2,"C1":"%s","C2":"b","C3":"c"}'}
    line = lines.get(FILE_FORMATS[name].suffix, b"1\t1\t2\t%s\tb\tc") % b"\xff\xfe"
    write_text(path, with_line(name, rows, 3, line))
    dataset = dataset_of(QueueDataset, name, [path])

    if name == "generator":
        with pytest.raises(DataError, match=rf"^{path}:3: .*UTF-8"):
            rows_of(dataset)
    else:
        keys = rows_of(dataset).keys
        assert int(keys[(1 if name == "csv" else 2) * 3]) == key_of(1, b"\xff\xfe")


@pytest.mark.parametrize("name", ["parquet", "orc"])
def test_bytes_that_are_no_text_are_a_value_in_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"part.{name}"
    values = {slot: pa.array([b"\xff\xfe"], pa.binary()) for slot in SCHEMA.slots}
    table = pa.table({"I1": [1], "I2": [2], **values})
    pq.write_table(table, path) if name == "parquet" else orc.write_table(table, str(path))

    keys = rows_of(dataset_of(QueueDataset, name, [path])).keys

    assert [int(key) for key in keys] == [key_of(slot, b"\xff\xfe") for slot in (1, 2, 3)]


@formats
@kinds
def test_file_without_rows_among_others_is_told(
    tmp_path: Path, name: str, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    files = [write(tmp_path, name, each, stem) for stem, each in (("a", rows), ("b", []))]

    actual = rows_of(dataset_of(kind, name, files))

    assert_same_rows(batch_of(rows), actual)
    warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert warnings == [f"a file has no rows: file={files[1]}"]


@formats
@kinds
def test_no_row_in_any_file_is_an_error(tmp_path: Path, name: str, kind: Kind) -> None:
    files = [write(tmp_path, name, [], stem) for stem in ("a", "b")]

    with pytest.raises(DataError, match=rf"^no rows in 2 files: {files[0]}, {files[1]} "):
        rows_of(dataset_of(kind, name, files))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gzip", "the file is truncated; copy or compress it again"),
        ("zstd", "the file is truncated; copy or compress it again"),
        ("parquet", "not a valid Parquet file"),
        ("keys", "not a valid Parquet file"),
        ("orc", "not a valid ORC file"),
        ("arrow", "not a valid Arrow file"),
    ],
)
@kinds
def test_truncated_file_is_named_and_the_ones_before_it_were_read(
    tmp_path: Path, kind: Kind, name: str, message: str
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    sound, cut = (write(tmp_path, name, rows, stem) for stem in ("a", "b"))
    cut.write_bytes(cut.read_bytes()[:-5])
    dataset = dataset_of(kind, name, [sound, cut], batch_size=len(rows))

    if isinstance(dataset, QueueDataset):
        batches = iter(dataset)
        assert_same_rows(batch_of(rows), next(batches))
        with pytest.raises(DataError, match=rf"^{cut}: {message}"):
            next(batches)
    else:
        with pytest.raises(DataError, match=rf"^{cut}: {message}"):
            dataset.load_into_memory()
        assert dataset.get_memory_data_size() == 0


@formats
@kinds
def test_file_that_vanished_is_named(tmp_path: Path, name: str, kind: Kind) -> None:
    path = tmp_path / f"absent{FILE_FORMATS[name].suffix}"

    with pytest.raises(DataError, match=rf"^cannot read '{path}': No such file"):
        rows_of(dataset_of(kind, name, [path]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "criteo",
            r"no rows in 1 file: {path} \(\d malformed rows\): the schema or the format is",
        ),
        ("csv", "{path}: no column 'C4', which the schema requires, did you mean"),
        ("libffm", None),  # left out is missing
        ("multislot", r"no rows in 1 file: {path} \(\d malformed rows\)"),
        ("parquet", "{path}: no column 'C4', which the schema requires, did you mean"),
        ("keys", "{path}: no column 'C4', which the schema requires, did you mean"),
        ("orc", "{path}: no column 'C4', which the schema requires, did you mean"),
        ("generator", "columns has no 'C4', expected every column of the schema"),
        ("pipe", "{path}: the command .*bad line 1, .*the line ends before 'C5'"),
    ],
)
@kinds
def test_schema_with_more_slots_is_refused(
    tmp_path: Path, kind: Kind, name: str, message: str | None
) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    path = write(tmp_path, name, rows)
    schema = Schema.numbered(NUM_DENSE, len(SCHEMA.slots) + 2)
    dataset = dataset_of(kind, name, [path], schema=schema, bad_row_limit=9)

    if message is None:
        assert rows_of(dataset).size == len(rows)
    else:
        with pytest.raises(CtrPsError, match="^" + message.format(path=re.escape(str(path)))):
            rows_of(dataset)


SCALED = replace(SCHEMA, dense=(DenseColumn(name="I1", scale=1e-33), *SCHEMA.dense[1:]))
BEYOND = Row(0, (10**6, 2), ("a", "b", "c"))
"""Whose first number is 1e39 when it is scaled."""


@formats
@kinds
def test_number_whose_scaling_float32_does_not_hold_is_a_malformed_row(
    tmp_path: Path, name: str, kind: Kind
) -> None:
    rows = [row for row in FILE_FORMATS[name].writable(ROWS) if row.numbers[0] != 2**31]
    text = FILE_FORMATS[name].skips_bad_rows
    bad = [BAD] if text else []
    path = write(tmp_path, name, [*rows[:2], *bad, rows[2], BEYOND, *rows[3:]])
    line = 4 + len(bad) + (name == "csv")
    place = f"row {line}" if name in COLUMNAR else str(line)
    fault = r"column 'I1' is 1000000\.0, scaled as the schema says, beyond the range of float32"

    if name in ("generator", "pipe"):
        where = rf"{path}:{place}: " if name == "generator" else rf"{path}: .*bad line {place}, .*"
        with pytest.raises(DataError, match=f"^{where}{fault}"):
            rows_of(dataset_of(kind, name, [path], schema=SCALED, bad_row_limit=9))
        return
    with pytest.raises(BadRowError, match=f"^{path}:{place}: {fault}; this is malformed row"):
        rows_of(dataset_of(kind, name, [path], schema=SCALED, bad_row_limit=len(bad)))
    dataset = dataset_of(kind, name, [path], schema=SCALED, bad_row_limit=len(bad) + 1)
    actual = rows_of(dataset)

    expected = batch_of(rows)
    assert (actual.size, dataset.bad_rows) == (len(rows), len(bad) + 1)
    assert actual.keys.tolist() == expected.keys.tolist()
    numbers = [np.nan if row.numbers[0] is None else row.numbers[0] * 1e33 for row in rows]
    assert actual.dense[:, 0].tolist() == np.nan_to_num(np.float32(numbers)).tolist()
