"""Profiles of files against plain counting, and the schemas made of them."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from ctr_ps.ctr_model.schema import DenseColumn, Schema, Transform
from ctr_ps.protos.errors import BadRowError, DataError
from ctr_ps.ps_worker.data.columns import without_label
from ctr_ps.ps_worker.extras.data_tools.column_stats import NumberStats
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.extras.data_tools.profile import (
    Profile,
    number_profile,
    profile_files,
    profile_table,
    scaled,
    schema_of,
)

TWO = Schema(dense=(DenseColumn(name="age"), DenseColumn(name="visits")), slots=("user", "item"))

ROWS = "1\t30\t5\ta\tx\n0\t\t7\tb\tx\n0\t50\t6\ta\t\n0\t20\t-3\ta\ty\n"


def profile_of(folder: Path, text: str, schema: Schema = TWO, bad_row_limit: int = 0) -> Profile:
    path = folder / "rows.tsv"
    path.write_text(text, encoding="utf-8")
    return profile_files([str(path)], schema, bad_row_limit=bad_row_limit)


def printed(profile: Profile) -> str:
    console = Console(width=150)
    with console.capture() as capture:
        console.print(profile_table(profile))
    return capture.get()


def test_planted_data_is_described_as_plain_counting_does(tmp_path: Path) -> None:
    generate(tmp_path, rows=3000, test_rows=100, files=2, test_files=1, seed=1)
    files = sorted(map(str, (tmp_path / "train").glob("*.tsv")))
    rows = [line.split("\t") for file in files for line in Path(file).read_text().splitlines()]

    profile = profile_files(files, Schema.load("criteo"))

    assert profile.rows == 3000
    assert profile.click_rate == sum(row[0] == "1" for row in rows) / 3000
    for column, number in enumerate(profile.numbers, start=1):
        values = np.array([float(row[column]) for row in rows if row[column]])
        assert number.missing_rate == pytest.approx(1 - len(values) / 3000)
        assert (number.min, number.max) == (values.min(), values.max())
        assert number.mean == pytest.approx(values.mean())
        assert number.deviation == pytest.approx(values.std())
        assert number.percentile_95 == np.sort(values)[math.ceil(0.95 * len(values)) - 1]
    for column, slot in enumerate(profile.slots, start=14):
        counts = Counter(row[column] for row in rows if row[column])
        assert slot.missing_rate == pytest.approx(1 - counts.total() / 3000)
        assert slot.num_distinct == len(counts)
        assert [count for _, count in slot.top] == [count for _, count in counts.most_common(5)]
        assert all(counts[value] == count for value, count in slot.top)


def test_slot_may_hold_any_number_of_values(tmp_path: Path) -> None:
    """Three rows: of 2, 0 and 3 values, two of which are missing ones."""
    words = pa.array([["a", "b"], [], ["", None, "a"]])
    pq.write_table(pa.table({"words": words}), tmp_path / "rows.parquet")
    schema = without_label(Schema(dense=(), slots=("words",)))

    profile = profile_files([f"{tmp_path}/rows.parquet"], schema)

    (found,) = profile.slots
    assert found.missing_rate == pytest.approx(1 / 3)
    assert (found.num_distinct, found.top) == (2, (("a", 2), ("b", 1)))


def test_value_is_found_wherever_it_stands(tmp_path: Path) -> None:
    schema = Schema(dense=(), slots=("first", "word"))
    path = tmp_path / "rows.csv"
    rows = [f"{number},{number}" for number in range(30_000)] + ["x,late"] * 5
    path.write_text("\n".join(["first,word", *rows]) + "\n")

    profile = profile_files([str(path)], schema)

    assert profile.slots[1].top[0] == ("late", 5)


def test_value_of_any_bytes_is_shown(tmp_path: Path) -> None:
    schema = Schema(dense=(), slots=("word",))
    path = tmp_path / "rows.tsv"
    path.write_bytes(b"1\tcaf\xc3\xa9\n1\t\xff\xfe\n1\t" + b"x" * 50 + b"\r\n")

    texts = {text for text, _ in profile_files([str(path)], schema).slots[0].top}

    assert texts == {"café", "\\xff\\xfe", "x" * 24 + "..."}


def test_rows_without_labels_have_no_click_rate(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, "3\t4\ta\tb\n")

    assert profile.click_rate is None
    assert profile.slots[0].top == (("a", 1),)
    assert "no labels" in printed(profile)


def test_malformed_rows_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    assert profile_of(tmp_path, ROWS + "bad\n", bad_row_limit=1).bad_rows == 1
    with pytest.raises(BadRowError, match=r"rows\.tsv:5: 1 column"):
        profile_of(tmp_path, ROWS + "bad\n")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows in 1 file"):
        profile_of(tmp_path, "")


def test_empty_file_among_others_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.touch()
    full.write_text(ROWS)

    assert profile_files([str(empty), str(full)], TWO).rows == 4
    assert caplog.messages == [f"a file has no rows: file={empty}"]


def test_files_with_and_without_labels_are_refused_by_name(tmp_path: Path) -> None:
    with_labels, without = tmp_path / "a", tmp_path / "b"
    with_labels.write_text(ROWS)
    without.write_text("3\t4\ta\tb\n")

    with pytest.raises(DataError, match=f"{without} has rows without labels, but {with_labels}"):
        profile_files([str(with_labels), str(without)], TWO)


@pytest.mark.parametrize("transform", ["none", "log1p", "min_max", "quantile"])
def test_written_schema_scales_the_data_as_the_transform_should(
    tmp_path: Path, transform: Transform
) -> None:
    generate(tmp_path, rows=4000, test_rows=100, files=1, test_files=1, seed=1)
    file = tmp_path / "train" / "part-000.tsv"
    profile = profile_files([str(file)], Schema.load("criteo"))
    path = tmp_path / "new.toml"
    path.write_text(schema_of(profile, transform).to_toml())
    schema = Schema.load(path)
    rows = [line.split("\t")[1:14] for line in file.read_text().splitlines()]
    values = np.array([[float(x) if x else np.nan for x in row] for row in rows])

    scaled = np.where(np.isnan(values), np.nan, schema.scale_dense(values))

    assert schema.slots == Schema.load("criteo").slots
    if transform in ("none", "log1p"):
        np.testing.assert_allclose(np.nanmean(scaled, axis=0), 0.0, atol=1e-4)
        np.testing.assert_allclose(np.nanstd(scaled, axis=0), 1.0, atol=1e-4)
    else:
        assert np.nanmin(scaled) >= 0.0
    if transform == "quantile":
        assert np.nanmax(scaled) <= 1.0
    if transform == "min_max":
        above = (scaled > 1.0).sum(axis=0) / (~np.isnan(scaled)).sum(axis=0)
        assert above.max() <= 0.05
        assert np.median(above) > 0.045  # a count is often the 95th percentile itself


def test_written_schema_keeps_the_name_of_the_label(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("bought,label,count,user\n1,0,3,a\n1,0,5,b\n0,0,7,a\n")
    schema = Schema(dense=(DenseColumn(name="count"),), slots=("user",), label="bought")

    profile = profile_files([str(path)], schema)

    assert profile.click_rate == pytest.approx(2 / 3)
    assert schema_of(profile, "none").label == "bought"


@pytest.mark.parametrize("transform", ["none", "log1p", "min_max", "quantile"])
def test_column_that_says_nothing_is_scaled_to_zero(tmp_path: Path, transform: Transform) -> None:
    text = "1\t4\t\ta\tx\n0\t4\t\tb\tx\n"

    schema = schema_of(profile_of(tmp_path, text), transform)

    scaled = schema.scale_dense(np.array([[4.0, np.nan], [5.0, 2.0]]))
    assert scaled.tolist() == [[0.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("transform", ["none", "log1p"])
def test_numbers_whose_squares_vanish_are_only_shifted(transform: Transform) -> None:
    stats = NumberStats(1)
    stats.add(np.array([[0.0], [3.5e-298]]))

    column = scaled(number_profile(stats, 0, "tiny"), transform)

    assert column == DenseColumn(name="tiny", shift=0.0)


@pytest.mark.parametrize("transform", ["none", "log1p", "min_max", "quantile"])
@pytest.mark.parametrize("most", [0.0, 1e-45, 1.0])
def test_scaling_of_a_far_number_is_one_that_float32_holds(
    transform: Transform, most: float
) -> None:
    numbers = np.array([[0.0]] * 5 + [[most]] * 94 + [[1e39]])
    stats = NumberStats(1)
    stats.add(numbers)

    column = scaled(number_profile(stats, 0, "far"), transform)

    schema = Schema(dense=(column,), slots=("s",))
    assert np.isfinite(schema.scale_dense(numbers)).all()
    assert schema.scale_dense(numbers)[-1, 0] > schema.scale_dense(numbers)[0, 0]


def test_min_max_of_a_column_that_is_nearly_always_the_least_takes_its_maximum(
    tmp_path: Path,
) -> None:
    text = "1\t-3\t1\ta\tx\n" * 99 + "1\t8\t1\ta\tx\n"

    age = schema_of(profile_of(tmp_path, text), "min_max").dense[0]

    assert (age.min, age.max) == (-3.0, 8.0)


def test_indicators_are_for_columns_with_missing_numbers(tmp_path: Path) -> None:
    schema = schema_of(profile_of(tmp_path, ROWS), "log1p", missing_indicators=True)

    assert [column.missing_indicator for column in schema.dense] == [True, False]


def test_table_shows_every_column(tmp_path: Path) -> None:
    lines = printed(profile_of(tmp_path, ROWS + "bad\n", bad_row_limit=1)).splitlines()

    shown = [line.split() for line in lines]
    assert lines[0] == "4 rows, click rate 0.2500, 1 malformed row"
    assert shown[1] == ["column", "missing", "min", "max", "mean", "deviation", "95th"]
    assert shown[2] == ["age", "25.00%", "20", "50", "33.3333", "12.4722", "50"]
    assert shown[5] == ["user", "0.00%", "2", "a", "75.00%", "b", "25.00%"]
    assert len(lines) == 7


def test_value_is_shown_with_its_brackets_and_says_nothing_to_a_terminal(tmp_path: Path) -> None:
    text = printed(profile_of(tmp_path, "1\t1\t2\t\x1b]0;x\x07\u202e\t[bold]a[/nothing]\n"))

    assert r"\x1b]0;x\x07\u202e" in text
    assert "[bold]a[/nothing]" in text


def test_table_says_what_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_worker.extras.data_tools.column_stats.MAX_SAMPLE", 100)
    monkeypatch.setattr("ctr_ps.ps_worker.extras.data_tools.column_stats.MAX_EXACT", 256)
    text = "".join(f"1\t{number}\t\tuser{number}\tx\n" for number in range(2000))

    profile = profile_of(tmp_path, text)

    assert abs(profile.slots[0].num_distinct - 2000) < 4 * 0.0081 * 2000
    assert "~" in printed(profile)
    assert "standard error 0.81 %" in printed(profile)
    assert "of a sample" in printed(profile)
    assert "-" in printed(profile).splitlines()[3]
