"""Formats by name and suffix."""

import re
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader
from ctr_ps.ps_worker.data.columns import columns_of
from ctr_ps.ps_worker.data.files.content import atomic_file
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import (
    FORMATS,
    SUFFIXES,
    doubt_about,
    format_of,
    has_named_columns,
    reader_of,
)
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.text.criteo import CriteoReader
from tests.support.formats import FILE_FORMATS

SCHEMA = Schema.numbered(1, 1)
ONE_SLOT = Schema(dense=(), slots=("C1",))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.tsv", "criteo"),
        ("s3://b/a.tsv.gz", "criteo"),
        ("part-0", "criteo"),
        ("a.txt.zst", "criteo"),
        ("OK.CSV", "csv"),
        ("A.Tsv.GZ", "criteo"),
        ("a.Parquet", "parquet"),
        ("a.SVM.Zst", "libsvm"),
    ],
)
def test_end_of_the_name_tells_the_format(path: str, name: str) -> None:
    assert format_of(path) == name


@pytest.mark.parametrize(
    ("name", "content", "doubt"),
    [
        ("a.xyz", b"PK", r"^'\.xyz' is not a known suffix \(\.tsv, \.csv, .*\.multislot\)$"),
        (
            "a.txt",
            b"click,user\n1,a\n",
            r"^'\.txt' .*\); its first line looks like a header: --format csv",
        ),
        ("part-0", b"1,a,b\tc\n", r"^its name has no suffix \(.*commas"),
        ("a.txt", b"1\ta,b\tc\n0,1,2,3,4\n", r"^'\.txt' is not a known suffix \([^,]*, [^;]*\)$"),
        ("A.TSV", b"1,2\n", "^$"),
    ],
)
def test_file_that_nothing_tells_the_format_of_is_doubted(
    tmp_path: Path, name: str, content: bytes, doubt: str
) -> None:
    (tmp_path / name).write_bytes(content)

    assert re.search(doubt, doubt_about(str(tmp_path / name), None))
    assert doubt_about(str(tmp_path / name), "criteo") == ""


def test_file_of_an_unknown_suffix_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    np.savez(path, rows=np.arange(9))
    dataset = QueueDataset(SCHEMA, 4, bad_row_limit=100)
    dataset.set_filelist([path])

    with pytest.raises(
        DataError, match=r"rows\.npz: '\.npz' is not a known suffix .*, and its content is not text"
    ):
        next(iter(dataset))


def test_compressed_file_with_capitals_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ROWS.CSV.GZ"
    with atomic_file(path) as file:
        file.write(b"label,I1,C1\n1,2,a\n")

    assert path.read_bytes()[:2] == b"\x1f\x8b"
    (block,) = reader_of(str(path), SCHEMA, BadRows()).blocks(FileSplit(str(path)))
    assert block.rows.dense.tolist() == [[2.0]]


def test_every_suffix_is_of_a_format() -> None:
    assert set(SUFFIXES.values()) <= set(FORMATS)


def test_every_format_has_a_reader_of_its_own() -> None:
    readers = {type(reader_of("rows", ONE_SLOT, BadRows(), name)) for name in FORMATS}

    assert len(readers) == len(FORMATS)


def test_suite_for_every_format_has_all_but_those_of_numbered_features() -> None:
    assert set(FORMATS) - set(FILE_FORMATS) == {"libsvm"}


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_taken_from_formats_whose_readers_have_columns(name: str) -> None:
    has_columns = isinstance(reader_of("rows", ONE_SLOT, BadRows(), name), ColumnReader)

    assert has_columns == has_named_columns("rows", name)
    if not has_columns and name != "criteo":
        with pytest.raises(UsageError, match=f"cannot read single columns of format '{name}'"):
            columns_of("rows", ONE_SLOT, BadRows(), format=name)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_compression_is_no_format(suffix: str) -> None:
    assert format_of(f"a{suffix}") == format_of(f"a{suffix}.gz") == format_of(f"a{suffix}.zst")


def test_format_by_name_overrules_the_file() -> None:
    assert isinstance(reader_of("a.orc", SCHEMA, BadRows(), "criteo"), CriteoReader)


def test_reader_of_ones_own_is_a_format() -> None:
    own = CriteoReader(SCHEMA, BadRows())

    assert reader_of("a.tsv", SCHEMA, BadRows(), lambda schema, bad_rows: own) is own


def test_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown format 'critio', did you mean 'criteo'"):
        reader_of("a.tsv", SCHEMA, BadRows(), "critio")
