"""Rows chosen by a comparison: what `--by`, `--test` and `--where` of `ps-data split` keep."""

import datetime
import itertools
import json
import operator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv, feather
from typer.testing import CliRunner

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.extras.data_tools.cli import app
from ctr_ps.ps_worker.extras.data_tools.row_split import Condition, split_rows

OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
DAY = datetime.datetime(2026, 11, 7, 10, 30)


@given(
    values=st.lists(st.none() | st.integers(-3, 3) | st.sampled_from([0.5, 2.25]), max_size=9),
    other=st.sampled_from([-1, 0, 0.5, 2]),
    name=st.sampled_from(list(OPERATORS)),
    is_text=st.booleans(),
)
def test_numbers_compare_as_numbers(
    values: list[float | None], other: float, name: str, is_text: bool
) -> None:
    texts = [None if each is None else str(each) for each in values]
    array = (
        pa.array([*texts, "x"], pa.string()) if is_text else pa.array([*values, None], pa.float64())
    )

    found = Condition.parse(f"price{name}{other}").rows(array).tolist()

    expected = [each is not None and OPERATORS[name](each, other) for each in values]
    assert found == [*expected, is_text and name == "!="]  # "x" differs from any number


@pytest.mark.parametrize(
    ("array", "condition", "expected"),
    [
        (pa.array([DAY, None]), "t >= 2026-11-07", [True, False]),
        (pa.array([DAY], pa.timestamp("s", "UTC")), "t < 2026-11-07 10:30:01", [True]),
        (pa.array([DAY.date()]), "t > 2026-11-07", [False]),
        (pa.array(["2026-11-07 10:00", "2026-1"]), "t >= 2026-11-07", [True, False]),
        (pa.array(["b", "a", None]).dictionary_encode(), "t == a", [False, True, False]),
        (pa.array(["ä", "b"], pa.string_view()), " t  !=  b ", [True, False]),
        (pa.array([True, False]), "t == 1", [True, False]),
        (pa.array([2**60, 1]), "a b > 5", [True, False]),
        (pa.array(["US", "DE", None]), "t != 'US'", [False, True, False]),
        (pa.array(["US", "DE"]), 't == "US"', [True, False]),
        (pa.array(["'US", "5"]), "t == 'US", [True, False]),
        (pa.array(["US", "5", None]), "t != 5", [True, False, False]),
    ],
)
def test_values_compare_by_the_type_of_the_column(
    array: pa.Array, condition: str, expected: list[bool]
) -> None:
    assert Condition.parse(condition).rows(array).tolist() == expected


@given(
    values=st.lists(st.sampled_from([0, 1, 2, 3, 1000, -1, -2]), min_size=1, max_size=6),
    base=st.sampled_from([2**53, 10**18 + 7, 2**63 - 1001, -(2**60), 2**64 - 1001, 10**30]),
    other=st.sampled_from([-1, 0, 1, 2, 3]),
    name=st.sampled_from(list(OPERATORS)),
)
def test_large_whole_numbers_compare_exactly(
    values: list[int], base: int, other: int, name: str
) -> None:
    whole = [base + each for each in values]
    condition = Condition.parse(f"id {name} {base + other}")
    expected = [OPERATORS[name](each, base + other) for each in whole]

    assert condition.rows(pa.array([*map(str, whole)])).tolist() == expected
    if base < 10**30:
        kind = pa.uint64() if base > 2**63 else pa.int64()
        assert condition.rows(pa.array(whole, kind)).tolist() == expected


@pytest.mark.parametrize(
    ("value", "hour"),  # the first hour, in UTC, that is from this value on
    [
        ("2026-11-07", 15),  # midnight in Tokyo
        ("2026-11-07 10:00", 25),
        ("2026-11-07T10:00:00Z", 34),
        ("2026-11-07 10:00:00+0200", 32),
        ("2026-11-07T10:00-05:00", 39),
    ],
)
def test_times_are_in_the_zone_of_the_column(value: str, hour: int) -> None:
    start = datetime.datetime(2026, 11, 6, tzinfo=datetime.UTC)
    times = [start + datetime.timedelta(hours=hours) for hours in range(48)]
    array = pa.array(times, pa.timestamp("us", "Asia/Tokyo"))

    found = Condition("t", ">=", value).rows(array).tolist()

    assert found == [each >= hour for each in range(48)]


@pytest.mark.parametrize(
    ("array", "value"),
    [(pa.array([1]), "x"), (pa.array([DAY]), "monday"), (pa.array([[1]]), "1")],
)
def test_value_of_another_type_is_refused(array: pa.Array, value: str) -> None:
    with pytest.raises(UsageError, match=f"column 't' is of type .* not comparable with '{value}'"):
        Condition("t", ">", value).rows(array)


@pytest.mark.parametrize("value", ["2026-13-05", "2026-02-30 10:00"])
def test_date_that_does_not_exist_is_refused(value: str) -> None:
    """Text would compare with it; an id like it may be equal to one."""
    with pytest.raises(UsageError, match=f"'{value}' is no date: "):
        Condition("t", ">=", value)
    assert Condition("t", "==", value).rows(pa.array([value, "x"])).tolist() == [True, False]


@pytest.mark.parametrize("text", ["", "clicks", "> 0", "clicks = 0"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--where is '{text}', expected a column"):
        Condition.parse(text)


def write(folder: Path, suffix: str) -> str:
    path = folder / f"rows.{suffix}"
    rows = [
        {
            "n": number,
            "a;b": "x, y" if number % 2 else None,
            "log": {"time": f"2026-11-{number:02}"},
        }
        for number in range(1, 10)
    ]
    table = pa.Table.from_pylist(rows)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif suffix == "csv":
        csv.write_csv(table.flatten(), path)
    else:
        getattr(
            pq if suffix == "parquet" else feather,
            {"parquet": "write_table"}.get(suffix, "write_feather"),
        )(table, str(path))
    return str(path)


def numbers_in(folder: Path) -> list[int]:
    (path,) = folder.iterdir()
    if path.suffix == ".parquet":
        return pq.read_table(path)["n"].to_pylist()
    if path.suffix == ".csv":
        return csv.read_csv(path)["n"].to_pylist()
    return [json.loads(line)["n"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "feather"])
def test_rows_from_a_time_on_are_the_test_set(tmp_path: Path, suffix: str) -> None:
    options = ["--by", "log.time", "--test", "2026-11-07", "--where", "n != 3"]
    path, out = write(tmp_path, suffix), tmp_path / "out"

    result = CliRunner().invoke(app, ["split", path, "--out", str(out), *options])

    assert result.exit_code == 0, result.output
    assert numbers_in(out / "train") == [1, 2, 4, 5, 6]
    assert numbers_in(out / "test") == [7, 8, 9]
    assert not (out / "validation").exists()


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_rows_are_filtered_with_a_ratio_too(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, suffix)

    sets = split_rows(
        [path], tmp_path / "out", ratio=(1, 1), where=[Condition("a;b", "==", "x, y")]
    )

    kept = [numbers_in(each.files[0].parent) for each in sets]
    assert sorted(itertools.chain(*kept)) == [1, 3, 5, 7, 9]


def test_what_does_not_fit_the_files_is_refused(tmp_path: Path) -> None:
    path, out = write(tmp_path, "csv"), tmp_path / "out"
    with pytest.raises(UsageError, match=r"no column 'log\.tim', did you mean 'log\.time'"):
        split_rows([path], out, by=Condition("log.tim", ">=", "1"))
    with pytest.raises(DataError, match="the set 'test' would be empty"):
        split_rows([path], out, by=Condition("n", ">=", "100"))
    (tmp_path / "rows.tsv").write_text("1\t2\n")
    with pytest.raises(UsageError, match="files of format 'criteo' have no column 'n'"):
        split_rows([str(tmp_path / "rows.tsv")], out, where=[Condition("n", ">", "0")])
    arguments: Any = ["split", path, "--out", str(out), "--by", "n"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("device.os == ios", [0, 3]),
        ("x == 1", [0, 2, 3]),
        ("x == 9007199254740993", [4]),
        ("x == a", [1]),
        ("a.b == c", [5]),
        ("b == 1", [0]),
    ],
)
def test_values_of_json_lines_compare_one_by_one(
    tmp_path: Path, where: str, expected: list[int]
) -> None:
    rows: list[dict[str, Any]] = [
        {"x": 1, "device": {"os": "ios"}, "b": True},
        {"x": "a", "device": "unknown", "b": False},
        {"x": True, "device": {"os": "android"}},
        {"x": 1.0, "device": {"os": "ios"}},
        {"x": 2**53 + 1, "device": None},
        {"x": 2**53, "a.b": "c", "device": {"os": 7}},
        {"x": "\ud800", "device": []},
    ]
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"n": n, **row}) for n, row in enumerate(rows)]
    path.write_text("\n".join([*lines, "no object", ""]), encoding="utf-8")

    split_rows([str(path)], tmp_path / "out", by=Condition.parse(where))

    assert numbers_in(tmp_path / "out" / "test") == expected


def test_lists_and_bare_words_for_truth_do_not_compare(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"l": [1], "b": true}\n{"l": null, "b": false}\n')
    with pytest.raises(UsageError, match="column 'l' has lists or objects, which do not compare"):
        split_rows([str(path)], tmp_path / "out", where=[Condition("l", "==", "1")])
    with pytest.raises(UsageError, match="'b' is of type bool, which is not comparable with 'yes'"):
        split_rows([str(path)], tmp_path / "out", where=[Condition("b", "==", "yes")])


def test_sets_of_an_earlier_call_are_replaced(tmp_path: Path) -> None:
    path, out = write(tmp_path, "jsonl"), tmp_path / "out"
    split_rows([path], out, ratio=(1, 1, 1), seed=3)
    assert {each.name for each in out.iterdir()} == {"train", "validation", "test"}

    split_rows([path], out, by=Condition("n", ">=", "5"))
    assert {each.name for each in out.iterdir()} == {"train", "test"}

    split_rows([path], out, ratio=(1, 1))
    assert {each.name for each in out.iterdir()} == {"train", "validation"}

    (out / "test").mkdir()
    (out / "test" / "part-of-mine").touch()
    with pytest.raises(UsageError, match="would be read as a file of the set 'test'"):
        split_rows([path], out, ratio=(1, 1))
    with pytest.raises(UsageError, match=r"--by chooses .* column 'n', and --ratio by a hash"):
        split_rows([path], out, ratio=(1, 1), by=Condition("n", ">=", "5"))
    inside = str(next((out / "validation").iterdir()))
    with pytest.raises(UsageError, match="where this split writes, but is an input"):
        split_rows([inside], out, by=Condition("n", ">=", "5"))


def test_text_as_polars_writes_it_is_split(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2, 3]})
    for name, kind in (("t", pa.string_view()), ("l", pa.list_(pa.string_view()))):
        values: list[Any] = ["a", None, "ä"] if name == "t" else [["a"], None, []]
        table = table.append_column(name, pa.array(values, kind))
    feather.write_feather(table, str(tmp_path / "rows.arrow"))

    split_rows([str(tmp_path / "rows.arrow")], tmp_path / "out", by=Condition("t", "==", "a"))

    found = [pq.read_table(tmp_path / "out" / name) for name in ("test", "train")]
    assert [each["t"].to_pylist() for each in found] == [["a"], [None, "ä"]]
    assert [each["l"].to_pylist() for each in found] == [[["a"]], [None, []]]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2], "s": pa.array([{}, {}], pa.struct([]))})
    feather.write_feather(table, str(tmp_path / "rows.arrow"))

    with pytest.raises(DataError, match=r"cannot write the rows of .*rows\.arrow"):
        split_rows([str(tmp_path / "rows.arrow")], tmp_path / "a" / "b", ratio=(1, 1))
    with pytest.raises(DataError, match="would be empty"):
        split_rows([write(tmp_path, "csv")], tmp_path / "a" / "b", by=Condition("n", ">", "99"))

    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.arrow", "rows.csv"]


def test_malformed_line_of_csv_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"n,text\n1,a\n2,b\rc\n3,d\n")
    with pytest.raises(DataError, match=r"rows\.csv:3: not CSV: new-line character"):
        split_rows([str(path)], tmp_path / "out", by=Condition("n", ">", "2"))
