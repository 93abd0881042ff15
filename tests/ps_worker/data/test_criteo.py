"""The Criteo reader: batches over files, rows without labels, malformed rows, real rows."""

import gzip
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from ctr_model.batch import Batch
from ctr_model.features import key_of
from ctr_model.schema import DenseColumn, Schema, criteo_schema
from protos.errors import BadRowError, DataError
from ps_worker.data.criteo import CriteoReader
from tests.reference import criteo as reference

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0, missing=-1.0),), slots=("user", "item")
)


def row(number: int) -> str:
    return f"{number % 2}\t{number}\tu{number}\ti{number}\n"


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(
    *files: Path, batch_size: int = 4, bad_row_limit: int = 0
) -> tuple[list[Batch], CriteoReader]:
    reader = CriteoReader(SCHEMA, batch_size=batch_size, bad_row_limit=bad_row_limit)
    return list(reader.batches(files)), reader


def ages(batches: list[Batch]) -> list[float]:
    return [float(age) * 2.0 + 1.0 for batch in batches for age in batch.dense[:, 0]]


def test_batch_holds_labels_scaled_numbers_and_one_key_a_slot(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "1\t7\talice\tbook\n0\t\t\tpen\n")

    (batch,), _ = read(path)

    assert batch.labels is not None
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.dense.tolist() == [[3.0], [-1.0]]
    assert batch.keys.tolist() == [
        key_of(1, "alice"), key_of(2, "book"), key_of(1, ""), key_of(2, "pen"),
    ]  # fmt: skip
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4]
    assert (batch.size, batch.num_slots) == (2, 2)
    arrays = (batch.labels, batch.dense, batch.keys, batch.offsets)
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "uint64", "int32"]


def test_batches_run_on_across_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tsv", "".join(row(n) for n in range(6)))
    second = write(tmp_path / "b.tsv.gz", "".join(row(n) for n in range(6, 11)))

    batches, reader = read(first, second)

    assert [batch.size for batch in batches] == [4, 4, 3]
    assert ages(batches) == list(range(11))
    assert [len(batch.offsets) for batch in batches] == [9, 9, 7]
    assert reader.rows == 11


def test_no_batch_is_empty(tmp_path: Path) -> None:
    empty = write(tmp_path / "a.tsv", "")
    full = write(tmp_path / "b.tsv", "".join(row(n) for n in range(4)))

    batches, _ = read(empty, full, empty)

    assert [batch.size for batch in batches] == [4]


def test_later_batches_leave_earlier_ones_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "".join(row(n) for n in range(3)))

    batches, _ = read(path, batch_size=1)

    assert [batch.keys[0] for batch in batches] == [key_of(1, f"u{n}") for n in range(3)]


def test_file_of_many_blocks_is_read_in_order(tmp_path: Path) -> None:
    num_rows = 120_000
    path = write(tmp_path / "a.tsv", "".join(row(n) for n in range(num_rows)))

    batches, _ = read(path, batch_size=50_000)

    assert path.stat().st_size > 2 << 20
    assert ages(batches) == list(range(num_rows))


def test_rows_without_label_give_batches_without(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "7\talice\tbook\n\t\tpen\n")

    (batch,), _ = read(path)

    assert batch.labels is None
    assert batch.dense.tolist() == [[3.0], [-1.0]]
    assert batch.keys[:2].tolist() == [key_of(1, "alice"), key_of(2, "book")]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (row(1), "7\talice\tbook\n", r"b\.tsv:1: 3 columns, expected 4 \(with a label\)"),
        ("7\talice\tbook\n", row(1), r"b\.tsv:1: 4 columns, expected 3 \(without a label\)"),
    ],
)
def test_rows_of_the_other_kind_are_malformed(
    tmp_path: Path, first: str, second: str, message: str
) -> None:
    files = [write(tmp_path / "a.tsv", first), write(tmp_path / "b.tsv", second)]

    with pytest.raises(BadRowError, match=message):
        read(*files)


def test_first_row_of_a_right_length_decides_about_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "garbage\n7\talice\tbook\n")

    (batch,), reader = read(path, bad_row_limit=1)

    assert batch.labels is None
    assert reader.bad_rows == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"1 columns, expected 4 \(with a label\): ''"),
        ("1\t5\tu", "3 columns, expected 4"),
        ("1\t5\tu\ti\tx", "5 columns, expected 4"),
        ("2\t5\tu\ti", "the label is '2', expected 0 or 1"),
        ("1\t5.5\tu\ti", r"column 2 \(age\) is '5\.5', expected a 64-bit integer or nothing"),
        ("1\t" + "9" * 70 + "\tu\ti", r"is '9{60}'\.\.\., expected"),
    ],
)
def test_malformed_row_is_named_by_file_line_and_fault(
    tmp_path: Path, bad: str, message: str
) -> None:
    path = write(tmp_path / "a.tsv", row(1) + row(2) + bad + "\n" + row(3))

    with pytest.raises(BadRowError, match=rf"a\.tsv:3: .*{message}"):
        read(path)


def test_malformed_rows_up_to_the_limit_are_skipped_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.tsv", row(1) + "x\n" + row(2) + "y\n" + row(3))

    with caplog.at_level(logging.WARNING):
        batches, reader = read(path, bad_row_limit=2)

    assert ages(batches) == [1, 2, 3]
    assert (reader.rows, reader.bad_rows) == (3, 2)
    assert "'y'" in caplog.messages[1]
    assert caplog.messages[1].endswith(f"file={path} line=4")
    assert caplog.messages[-1] == "malformed rows skipped: bad_rows=2 rows=3"


def test_one_malformed_row_over_the_limit_ends_the_run(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tsv", row(1) + "x\n" * 2)
    second = write(tmp_path / "b.tsv", row(1) * 9 + "x\n")

    with pytest.raises(BadRowError, match=r"b\.tsv:10: .* malformed row 3, and bad_row_limit is 2"):
        read(first, second, bad_row_limit=2)


def test_many_malformed_rows_do_not_flood_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.tsv", row(1) + "x\n" * 300 + row(2))

    with caplog.at_level(logging.WARNING):
        batches, reader = read(path, bad_row_limit=300)

    assert ages(batches) == [1, 2]
    assert reader.bad_rows == 300
    assert len(caplog.messages) <= 10


def test_unreadable_file_ends_the_run_after_the_batches_before_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", row(1))
    batches = CriteoReader(SCHEMA, batch_size=1).batches([path, tmp_path / "absent.tsv"])

    next(batches)

    with pytest.raises(DataError, match=r"absent\.tsv"):
        next(batches)


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 1, "bad_row_limit": -1}])
def test_impossible_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        CriteoReader(SCHEMA, **arguments)


def test_real_rows_equal_rows_parsed_by_python() -> None:
    folder = os.environ.get("CTR_SAMPLE_DIR")
    if folder is None and not os.environ.get("CI"):
        pytest.skip("CTR_SAMPLE_DIR names no folder with rows of Criteo")
    path = min(Path(folder or "").glob("*.tsv.gz"))
    schema = criteo_schema()

    batch = next(CriteoReader(schema, batch_size=300).batches([path]))

    with gzip.open(path) as file:
        rows = [reference.parse_row(next(file).rstrip(b"\n"), schema) for _ in range(300)]
    labels, dense, keys = zip(*(row for row in rows if row is not None), strict=True)
    assert batch.labels is not None
    assert batch.labels.tolist() == list(labels)
    np.testing.assert_allclose(batch.dense, np.array(dense), rtol=1e-6, atol=1e-6)
    assert batch.keys.tolist() == [key for row_keys in keys for key in row_keys]
