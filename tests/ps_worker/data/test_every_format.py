"""What holds for files of every format, as datasets read them: the same rows, and resume."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import DataPosition
from ctr_ps.ps_worker.data.columnar import column_matching, record_batches
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.text import text_reader
from ctr_ps.ps_worker.data.user_code import generator_reader, pipe
from tests.reference.features import key_of
from tests.support.formats import (
    FILE_FORMATS,
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
)
from tests.support.rows import assert_same_rows

# The same rows


@formats
@kinds
def test_rows_are_the_same_from_every_format(tmp_path: Path, name: str, kind: Kind) -> None:
    rows = FILE_FORMATS[name].writable(ROWS)
    files = [write(tmp_path, name, rows[:2], "a"), write(tmp_path, name, rows[2:], "b")]

    actual = rows_of(dataset_of(kind, name, files))

    assert len(rows) >= 4
    assert_same_rows(batch_of(rows), actual)


SHARING = replace(SCHEMA, shares={"C3": "C1"})


@formats
def test_a_slot_that_shares_keys_has_those_of_its_values_in_the_other_slot(
    tmp_path: Path, name: str
) -> None:
    rows = FILE_FORMATS[name].writable(
        [Row(1, (1, 2), ("a", "a", "a")), Row(0, (1, 2), ("b", "b", ""))]
    )
    path = write(tmp_path, name, rows, schema=SHARING)

    keys = rows_of(dataset_of(QueueDataset, name, [path], schema=SHARING)).keys.tolist()

    expected = [
        key_of(slot, row.values[i].encode()) for row in rows for i, slot in enumerate((1, 2, 1))
    ]
    assert keys == expected


@pytest.mark.parametrize(("written", "read"), [(SCHEMA, SHARING), (SHARING, SCHEMA)])
def test_a_file_of_keys_that_were_shared_otherwise_is_refused(
    tmp_path: Path, written: Schema, read: Schema
) -> None:
    path = write(tmp_path, "keys", ROWS, schema=written)

    with pytest.raises(
        DataError, match=r"'C3' was hashed with slot ., but 'shares' of the schema expects slot"
    ):
        rows_of(dataset_of(QueueDataset, "keys", [path], schema=read))


numbers = st.none() | st.integers(-(2**63), 2**63 - 1)
values = st.text(st.characters(exclude_categories=["Cs"]), max_size=24)
rows_of_any_text = st.lists(
    st.builds(Row, st.integers(0, 1), st.tuples(numbers, numbers), st.tuples(*[values] * 3)),
    min_size=1,
    max_size=8,
)


def without(pattern: str, row: Row) -> Row:
    first, second, third = (re.sub(pattern, "", value) for value in row.values)
    return replace(row, values=(first, second, third))


@formats
def test_any_text_and_any_number_are_the_same_from_every_format(name: str) -> None:
    @settings(max_examples=10 if name == "pipe" else 40)
    @given(rows_of_any_text)
    def check(drawn: list[Row]) -> None:
        rows = [without(FILE_FORMATS[name].cannot_write, row) for row in drawn]
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder), name, rows)

            actual = rows_of(dataset_of(QueueDataset, name, [path]))

        assert_same_rows(batch_of(rows), actual)

    check()


# Resume


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has each reader cut files of some rows into several blocks."""
    monkeypatch.setattr(text_reader.line_blocks, "__defaults__", (None, 96))
    monkeypatch.setattr(column_matching, "READ_ROWS", 4)
    monkeypatch.setattr(record_batches, "BLOCK_ROWS", 2)
    monkeypatch.setattr(
        record_batches, "_single_offsets", record_batches._single_offsets.__wrapped__
    )
    monkeypatch.setattr(generator_reader, "_BLOCK_ROWS", 2)
    monkeypatch.setattr(pipe, "_BLOCK_BYTES", 64)


def rows_of_files(contents: list[str]) -> list[list[Row]]:
    """Returns a row for each letter, all different: of "b" a malformed one."""
    number = 0
    files = []
    for content in contents:
        rows = []
        for letter in content:
            number += 1
            values = (f"u{number}", "" if number % 3 else "é" * (number % 5), "c")
            label = 7 if letter == "b" else number % 2
            rows.append(Row(label, (number, None if number % 4 else -number), values))
        files.append(rows)
    return files


contents = st.lists(st.text("gggb", max_size=12), min_size=1, max_size=3)


def files_of(name: str, contents: list[str], folder: Path, num_splits: int) -> list[FileSplit]:
    """Writes files, in which there is at least one good row, and cuts them."""
    contents = [contents[0] + "g", *contents[1:]]
    if not FILE_FORMATS[name].skips_bad_rows:
        contents = [content.replace("b", "") for content in contents]
    splits = []
    for index, rows in enumerate(rows_of_files(contents)):
        path = str(write(folder, name, rows, str(index)))
        reader = reader_of(path, SCHEMA, BadRows(), FILE_FORMATS[name].reader)
        splits += reader.splits(path, num_splits if name != "pipe" else 1)
    return splits


Pass = list[tuple[tuple[bytes, ...], DataPosition]]


def all_of(batches: Iterator[tuple[Batch, DataPosition]]) -> Pass:
    """Returns all batches, bit for bit, and the positions after them, as a checkpoint holds them."""
    return [
        (as_bytes(batch), DataPosition.from_json(position.to_json())) for batch, position in batches
    ]


def as_bytes(batch: Batch) -> tuple[bytes, ...]:
    assert batch.labels is not None
    columns = (batch.labels, batch.dense, batch.keys, batch.offsets)
    return tuple(column.tobytes() for column in columns)


def batches_of(given_batches: Pass) -> list[tuple[bytes, ...]]:
    return [batch for batch, _ in given_batches]


@formats
@pytest.mark.usefixtures("small_blocks")
def test_streaming_goes_on_from_every_position_with_exactly_the_rest(name: str) -> None:
    @settings(max_examples=8 if name == "pipe" else 20)
    @given(contents, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(1, 2))
    def check(
        contents: list[str], batch_size: int, num_splits: int, shuffle_files: bool, epoch: int
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            splits = files_of(name, contents, Path(folder), num_splits)

            def new() -> QueueDataset:
                options: dict[str, Any] = {
                    "bad_row_limit": 99,
                    "shuffle_files": shuffle_files,
                    "seed": 3,
                }
                return dataset_of(QueueDataset, name, splits, batch_size, **options)

            dataset = new()
            for _ in range(epoch):
                given_batches = all_of(dataset.positioned())
            next_epoch = all_of(dataset.positioned())

            for number, (_, position) in enumerate(given_batches, start=1):
                resumed = new()
                rest = all_of(resumed.positioned(position))
                assert batches_of(rest) == batches_of(given_batches[number:])
                # Blocks may be others now, and so their offsets; they are as good.
                for _, resumed_position in rest[:1]:
                    again = all_of(new().positioned(resumed_position))
                    assert batches_of(again) == batches_of(rest[1:])
            assert all_of(resumed.positioned()) == next_epoch

    check()
