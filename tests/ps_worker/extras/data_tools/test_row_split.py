"""Splitting into sets: each row once, the ratio, independence of blocks and compression."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, feather, orc
from pyarrow import json as arrow_json

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.negative_sampling import row_hash
from ctr_ps.ps_worker.data.text import text_reader
from ctr_ps.ps_worker.extras.data_tools.row_split import (
    Condition,
    WrittenSet,
    parse_ratio,
    split_rows,
)


def lines_of(num_rows: int, name: str = "row") -> list[str]:
    return [f"{name} {number}" + "x" * (number % 7) for number in range(num_rows)]


def write(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def read(written: WrittenSet) -> list[str]:
    return [line for path in written.files for line in path.read_text().splitlines()]


def bytes_below(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_row_is_in_one_set_in_the_order_of_the_files(tmp_path: Path) -> None:
    first, second = lines_of(500, "first"), lines_of(300, "second")
    files = [write(tmp_path / "b.tsv", first), write(tmp_path / "a.tsv", second)]

    train, validation = split_rows(files, tmp_path / "out")

    rows, held = read(train), set(read(validation))
    assert rows == [line for line in first + second if line not in held]
    assert len(held) == validation.rows == 800 - train.rows
    assert (train.name, validation.name) == ("train", "validation")


@pytest.mark.parametrize("ratio", [(9, 1), (1, 1), (8, 1, 1)])
def test_sets_have_the_sizes_of_the_ratio(tmp_path: Path, ratio: tuple[int, ...]) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(20_000))

    sets = split_rows([file], tmp_path / "out", ratio=ratio, seed=3)

    assert [each.name for each in sets] == ["train", "validation", "test"][: len(ratio)]
    for share, each in zip(np.array(ratio) / sum(ratio), sets, strict=True):
        deviation = np.sqrt(share * (1 - share) / 20_000)
        assert abs(each.rows / 20_000 - share) < 4 * deviation


def test_row_goes_by_its_hash(tmp_path: Path) -> None:
    lines = lines_of(300)

    train, _ = split_rows([write(tmp_path / "rows.tsv", lines)], tmp_path / "out", seed=7)

    in_train = [row_hash(7, row) < 9 * 2**64 // 10 for row in range(300)]
    assert read(train) == [line for line, is_there in zip(lines, in_train, strict=True) if is_there]


def test_sets_do_not_depend_on_how_the_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on blocks, nor on compression, nor on where a file ends and the next begins."""
    lines = lines_of(700)
    plain = write(tmp_path / "rows.tsv", lines)
    packed = tmp_path / "rows.tsv.gz"
    packed.write_bytes(gzip.compress(Path(plain).read_bytes().removesuffix(b"\n")))
    cut = [write(tmp_path / "1.tsv", lines[:9]), write(tmp_path / "2.tsv", lines[9:])]
    split_rows([plain], tmp_path / "expected")

    monkeypatch.setattr(text_reader.line_blocks, "__defaults__", (None, 64))
    split_rows([plain], tmp_path / "blocks")
    split_rows([str(packed)], tmp_path / "packed")
    split_rows(cut, tmp_path / "cut")

    expected = bytes_below(tmp_path / "expected")
    assert len(expected) == 2
    for name in ("blocks", "packed", "cut"):
        assert bytes_below(tmp_path / name) == expected


def test_files_hold_so_many_rows_each(tmp_path: Path) -> None:
    lines = lines_of(1000)
    file = write(tmp_path / "rows.tsv", lines)
    whole = split_rows([file], tmp_path / "whole", ratio=(1, 1))

    cut = split_rows([file], tmp_path / "cut", ratio=(1, 1), rows_per_file=100)

    for one, many in zip(whole, cut, strict=True):
        assert read(many) == read(one)
        sizes = [len(path.read_text().splitlines()) for path in many.files]
        assert sizes[:-1] == [100] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 100
    assert [path.name for path in cut[0].files][:2] == ["part-00000.tsv", "part-00001.tsv"]


def test_set_of_exactly_full_files_has_no_empty_one(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(100))
    rows = split_rows([file], tmp_path / "a")[0].rows

    train, _ = split_rows([file], tmp_path / "b", rows_per_file=rows)

    assert len(train.files) == 1


@pytest.mark.parametrize("suffix", [".tsv.gz", ".tsv.zst"])
def test_files_are_compressed_as_the_suffix_asks(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(500))
    plain = split_rows([file], tmp_path / "plain")
    packed = split_rows([file], tmp_path / "packed", suffix=suffix)
    split_rows([file], tmp_path / "again", suffix=suffix)

    for one, other in zip(plain, packed, strict=True):
        with pa.input_stream(str(other.files[0]), compression="detect") as stream:
            assert stream.read() == one.files[0].read_bytes()
        assert other.files[0].name == f"part-00000{suffix}"
    assert bytes_below(tmp_path / "packed") == bytes_below(tmp_path / "again")


def test_second_call_replaces_what_the_first_wrote(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(500))
    split_rows([file], tmp_path / "twice", rows_per_file=50)
    split_rows([file], tmp_path / "twice", seed=2, suffix=".tsv.gz")
    split_rows([file], tmp_path / "once", seed=2, suffix=".tsv.gz")

    assert bytes_below(tmp_path / "twice") == bytes_below(tmp_path / "once")


def test_failure_leaves_what_was_there(tmp_path: Path) -> None:
    good = write(tmp_path / "rows.tsv", lines_of(500))
    broken = tmp_path / "broken.tsv.gz"
    broken.write_bytes(gzip.compress(b"row\n" * 9)[:-9])
    split_rows([good], tmp_path / "out")
    before = bytes_below(tmp_path / "out")

    with pytest.raises(DataError, match="broken"):
        split_rows([good, str(broken)], tmp_path / "out", seed=2)

    assert bytes_below(tmp_path / "out") == before


def test_last_line_without_an_end_and_carriage_returns_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"a\r\nb\r\nc\r\nd\r\n" * 20 + b"last")

    sets = split_rows([str(path)], tmp_path / "out", ratio=(1, 1))

    content = b"".join(file.read_bytes() for each in sets for file in each.files)
    assert content.count(b"\r\n") == 80
    assert content.count(b"last\n") == 1


def test_empty_file_is_passed_over_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [write(tmp_path / "empty.tsv", []), write(tmp_path / "rows.tsv", lines_of(100))]

    sets = split_rows(files, tmp_path / "out")

    assert sum(each.rows for each in sets) == 100
    assert "a file has no rows: file=" in caplog.text
    assert "empty.tsv" in caplog.text


@pytest.mark.parametrize("num_rows", [0, 1])
def test_set_without_a_row_is_refused(tmp_path: Path, num_rows: int) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(num_rows))

    with pytest.raises(DataError, match=f"would be empty, as {num_rows} rows are too few"):
        split_rows([file], tmp_path / "out")

    assert bytes_below(tmp_path / "out") == {}


def test_files_of_other_columns_are_refused(tmp_path: Path) -> None:
    for suffix in (".csv", ".parquet"):
        for name in ("a", "b"):
            path, table = tmp_path / f"{name}{suffix}", pa.table({name: [1, 2, 3]})
            csv.write_csv(table, path) if suffix == ".csv" else pq.write_table(table, path)

        with pytest.raises(
            DataError, match=rf"b\{suffix}: its (header|columns).* split them separately"
        ):
            split_rows([f"{tmp_path}/a{suffix}", f"{tmp_path}/b{suffix}"], tmp_path / "sets")

    assert not list((tmp_path / "sets").rglob("part-*"))


def test_sets_are_never_written_over_their_source(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    file = write(tmp_path / "train" / "part-00000.tsv", lines_of(100))

    with pytest.raises(
        UsageError, match="where this split writes, but is an input: choose another output folder"
    ):
        split_rows([file], tmp_path)

    assert len(Path(file).read_text().splitlines()) == 100


@pytest.mark.parametrize("name", ["part-0", "part-00000", "part-000.tsv"])
def test_files_that_an_earlier_call_did_not_write_are_not_touched(
    tmp_path: Path, name: str
) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(500))
    split_rows([file], tmp_path)
    write(tmp_path / "validation" / name, ["mine"])
    before = bytes_below(tmp_path)

    with pytest.raises(UsageError, match=f"{name}' would be read as a file of the set 'valid"):
        split_rows([file], tmp_path, seed=2)

    assert bytes_below(tmp_path) == before


def test_suffix_of_another_format_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.svm", lines_of(500))

    with pytest.raises(UsageError, match=r"'.tsv', the suffix of criteo files, but .* is libsvm"):
        split_rows([file], tmp_path, suffix=".tsv")

    assert split_rows([file], tmp_path, suffix=".svm")[0].files[0].name == "part-00000.svm"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": "tsv"}, "suffix is 'tsv'"),
        ({"suffix": ".tsv/x"}, "suffix is '.tsv/x'"),
    ],
)
def test_option_that_makes_no_sense_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        split_rows(["rows.tsv"], tmp_path, **options)  # type: ignore[arg-type]


def test_ratio_is_read_from_text() -> None:
    assert parse_ratio("9:1") == (9, 1)
    for wrong in ("9/1", "9", "9:0", "7:1:1:1", "9:-1", ""):
        with pytest.raises(UsageError, match=f"ratio is '{wrong}', expected two or three"):
            parse_ratio(wrong)


def test_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.tsv", lines_of(100))

    with pytest.raises(DataError, match=r"cannot write to .*rows\.tsv"):
        split_rows([file], Path(file))


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet", ".orc", ".feather", ".jsonl"])
def test_files_that_name_their_columns_are_split_as_lines_are(tmp_path: Path, suffix: str) -> None:
    """Every row is once in the set that its number says, and every file has the names of the columns."""
    texts = [f"w{number}" for number in range(1000)]
    files = []
    for part in range(2):
        table = pa.table(
            {"n": range(part * 500, part * 500 + 500), "word": texts[part * 500 :][:500]}
        )
        files.append(str(tmp_path / f"{part}{suffix}"))
        if suffix == ".parquet":
            pq.write_table(table, files[-1])
        elif suffix == ".orc":
            orc.write_table(table, files[-1])
        elif suffix == ".feather":
            feather.write_feather(table, files[-1], chunksize=70)
        elif suffix == ".jsonl":
            lines = [json.dumps(row) + "\n" for row in table.to_pylist()]
            Path(files[-1]).write_text("".join(lines), encoding="utf-8")
        else:
            with pa.output_stream(files[-1]) as sink:
                csv.write_csv(table, sink)

    sets = split_rows(files, tmp_path / "out", ratio=(3, 1), seed=4, rows_per_file=100)

    readers = {".csv": csv.read_csv, ".jsonl": arrow_json.read_json}
    read = readers.get(suffix.removesuffix(".gz"), pq.read_table)
    for number, each in enumerate(sets):
        tables = [read(str(path)) for path in each.files]
        found = pa.concat_tables(tables)
        assert [len(table) for table in tables[:-1]] == [100] * (len(tables) - 1)
        expected = [n for n in range(1000) if (row_hash(4, n) >= 3 << 62) == bool(number)]
        assert found["n"].to_pylist() == expected
        assert found["word"].to_pylist() == [f"w{n}" for n in expected]
    assert sum(each.rows for each in sets) == 1000


@pytest.mark.parametrize("content", [b"", b"a,b\n"])
def test_csv_without_rows_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)

    with pytest.raises(DataError, match="would be empty, as 0 rows are too few"):
        split_rows([str(tmp_path / "a.csv")], tmp_path / "sets")


def test_words_of_slot_text_choose_rows(tmp_path: Path) -> None:
    lines = [
        f"day:{row} user:u{row} click:0\n" if row != 5 else "user:u5 click:0\n" for row in range(9)
    ]
    path = tmp_path / "part-0"
    path.write_text("".join(lines))
    by, where = Condition("day", ">=", "7"), [Condition("user", "!=", "u2")]

    split_rows([str(path)], tmp_path / "sets", format="paddlerec", by=by, where=where)

    written = {
        name: tmp_path / "sets" / name / "part-00000.paddlerec" for name in ("train", "test")
    }
    assert written["test"].read_text() == "".join(lines[7:])
    assert written["train"].read_text() == "".join(lines[:2] + lines[3:7])
