"""Samples: what they hold of files, and how many rows those are."""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.extras.data_tools import samples
from ctr_ps.ps_worker.extras.data_tools.samples import sample_of

WORDS = ["a", "b", None]
LISTS = [["a"], ["b", "a"], None]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("values", "kind", "plain"),
    [
        (WORDS, pa.string_view(), pa.string()),
        (WORDS, pa.dictionary(pa.int8(), pa.string()), pa.string()),
        (LISTS, pa.list_(pa.string_view()), pa.list_(pa.string())),
        (LISTS, pa.list_(pa.dictionary(pa.int32(), pa.string())), pa.list_(pa.string())),
    ],
)
def test_files_with_and_without_views_and_dictionaries_are_joined(
    tmp_path: Path, values: list[Any], kind: pa.DataType, plain: pa.DataType, suffix: str
) -> None:
    for name, each in (("1", kind), ("2", plain)):
        table = pa.table({"x": pa.array(values, each)})
        if suffix == "parquet":
            pq.write_table(table, tmp_path / f"{name}.parquet")
        else:
            with pa.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
                file.write(table)

    sample = sample_of([f"{tmp_path}/{name}.{suffix}" for name in "12"])

    assert sample.columns["x"].to_pylist() == values * 2


@pytest.mark.parametrize("separator", [",", "\t", ";", "|"])
def test_columns_are_separated_as_in_the_header(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('click,"a;b|c"\n0,x\n'.replace(",", separator))

    sample = sample_of([str(path)])

    assert {name: array.to_pylist() for name, array in sample.columns.items()} == {
        "click": [b"0"],
        "a;b|c": [b"x"],
    }


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (
            "a.tsv",
            "click\tuser",
            "names of columns; its first line looks like a header: --format csv",
        ),
        ("a.txt", "click;user", r"known suffix .* looks like a header: --format csv"),
        ("a.txt", "1,2", r"known suffix .* has commas: --format csv"),
        ("a.tsv", "1\t2", r"names of columns\. If its format"),
        ("a.npz", "\0", r"'\.npz' is not a known suffix"),
    ],
)
def test_option_for_files_without_a_telling_suffix_is_named(
    tmp_path: Path, name: str, line: str, message: str
) -> None:
    (tmp_path / name).write_text(f"{line}\n0\tx\n")

    with pytest.raises((UsageError, DataError), match=message):
        sample_of([str(tmp_path / name)])


def test_sample_of_orc_does_not_hold_whole_stripes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"n": np.arange(300_000), "text": [f"value {n}" for n in range(300_000)]})
    orc.write_table(table, str(tmp_path / "rows.orc"))
    monkeypatch.setattr(samples, "SAMPLE_ROWS", 1000)
    held: list[int] = []
    join = samples._joined

    def measured(tables: Sequence[pa.Table], names: Sequence[str]) -> dict[str, pa.Array]:
        held.append(sum(each.get_total_buffer_size() for each in tables))
        return join(tables, names)

    monkeypatch.setattr(samples, "_joined", measured)

    sample = sample_of([str(tmp_path / "rows.orc")])

    assert 0 < sample.num_rows <= 1000
    assert max(held) < table.nbytes / 10


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".csv.zst"])
def test_rows_of_text_are_estimated_by_the_bytes_that_the_sample_takes_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(samples, "SAMPLE_ROWS", 20_000)
    users = np.random.default_rng(1).integers(0, 10**6, 100_000)
    text = "click,user\n" + "".join(f"0,user-of-the-shop-{user:06d}\n" for user in users)
    path = tmp_path / f"rows{suffix}"
    if suffix == ".csv.zst":
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(text.encode())
    else:
        path.write_bytes(gzip.compress(text.encode()) if suffix == ".csv.gz" else text.encode())

    sample = sample_of([str(path)])

    assert not sample.is_complete
    assert sample.total_rows == pytest.approx(100_000, rel=0.1)


def test_columns_of_json_that_the_reader_refuses_are_unusable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"click": 0, "x": 1.5, "y": 1, "device": {"os": "a"}, "z": [1]}\n'
        '{"click": true, "x": "a", "y": "b", "device": "c", "z": 2}\n'
        '{"click": 1, "x": null, "device": null, "z": null}\n'
    )

    sample = sample_of([str(path)])

    assert {name: array.to_pylist() for name, array in sample.columns.items()} == {
        "click": [0.0, 1.0, 1.0],
        "y": ["1", "b", None],
        "z": [[1], [2], None],
    }
    assert sample.unusable["x"] == "mixed values: numbers, text"
    assert set(sample.unusable) == {"x", "device", "device.os"}


def test_columns_of_json_that_sampled_lines_lack_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "SAMPLE_ROWS", 8)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"click": 0}\n{"click": 1, "x": "a"}\n' + '{"click": 0}\n' * 500)

    assert sample_of([str(path)]).columns["x"].null_count == 8


def test_malformed_rows_that_a_sample_leaves_out_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('click,note\n1,a\n0,"two\nlines"\n1,b\n0,"two\nlines"\n')

    sample = sample_of([str(path)])

    assert sample.num_rows == 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4  # each half of a row
    assert "skipped a malformed row: a quote is not closed" in messages[0]
    assert messages[0].endswith(f"file={path} place=3")
