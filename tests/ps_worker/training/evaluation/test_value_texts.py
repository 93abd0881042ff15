"""Texts of the values that figures by slot value name."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from ctr_ps.ps_worker.data import distinct_values
from ctr_ps.ps_worker.extras.data_tools.convert import convert
from ctr_ps.ps_worker.training.evaluation import breakdown
from ctr_ps.ps_worker.training.evaluation.breakdown import ValueTexts

SCHEMA = Schema(dense=(), slots=("user", "site"), label="click")
SITES = ["a", "größe", "", "c"]
ROWS = {"click": [0, 1, 0, 1], "user": [1, 2, 3, 4], "site": SITES}


@pytest.fixture
def file(tmp_path: Path) -> str:
    pq.write_table(pa.table(ROWS), tmp_path / "rows.parquet")
    return f"{tmp_path}/rows.parquet"


def test_texts_are_found_by_their_keys_and_read_once(file: str) -> None:
    texts = ValueTexts([file], SCHEMA, None)
    keys = {key_of(2, site): site for site in SITES}

    found = texts.find("site", keys)
    Path(file).unlink()

    assert found == keys
    assert texts.find("site", list(keys)[:2]) == dict(list(keys.items())[:2])


def test_a_slot_has_its_own_keys_and_unknown_ones_have_no_text(file: str) -> None:
    texts = ValueTexts([file], SCHEMA, None)

    assert texts.find("user", [key_of(1, "3"), key_of(2, "a")]) == {key_of(1, "3"): "3"}


def test_text_that_is_not_there_is_sought_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ValueTexts([file], SCHEMA, None)
    keys = [key_of(2, "a"), key_of(2, "unknown")]
    expected = texts.find("site", keys)

    monkeypatch.setattr(distinct_values, "DistinctValues", None)

    assert texts.find("site", keys) == expected == {keys[0]: "a"}


def test_values_of_criteos_layout_have_texts(tmp_path: Path) -> None:
    values = [f"{number:08x}" for number in range(26)]
    (tmp_path / "rows.tsv").write_text("\t".join(["1", *map(str, range(13)), *values]) + "\n")
    texts = ValueTexts([f"{tmp_path}/rows.tsv"], criteo_schema(), None)

    assert texts.find("C3", [key_of(3, values[2])]) == {key_of(3, values[2]): values[2]}


def test_files_without_values_have_no_texts(file: str, tmp_path: Path) -> None:
    assert convert([file], tmp_path / "keys", SCHEMA, keys=True).rows == 4
    (tmp_path / "rows.svm").write_text("1 1:1\n")
    keys = [key_of(2, "a")]

    for path in (*(tmp_path / "keys").glob("part-*"), tmp_path / "rows.svm"):
        assert ValueTexts([str(path)], SCHEMA, None).find("site", keys) == {}
    assert ValueTexts([], SCHEMA, None).find("site", keys) == {}


def test_reading_ends_where_all_are_found_or_enough_was_read(
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({**ROWS, "site": ["later"] * 4}), other)
    key = key_of(2, "later")

    assert ValueTexts([file, str(other)], SCHEMA, None).find("site", [key]) == {key: "later"}
    missing = f"{tmp_path}/none.parquet"
    assert ValueTexts([file, missing], SCHEMA, None).find("site", [key_of(2, "a")])
    assert missing not in caplog.text
    monkeypatch.setattr(breakdown, "MAX_ROWS", 3)
    assert ValueTexts([file, str(other)], SCHEMA, None).find("site", [key]) == {}
