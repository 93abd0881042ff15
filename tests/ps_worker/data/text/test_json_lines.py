"""JSON lines: what a line means does not depend on how its block is read, and faults have their lines."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import BadRowError, DataError
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.formats import values_of_files
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.data.sources import opened
from ctr_ps.ps_worker.data.text import json_lines
from tests.reference.features import key_of

SCHEMA = Schema(
    dense=(DenseColumn(name="price"), DenseColumn(name="device.age")),
    slots=("user", "device.os", "tags"),
    label="click",
)


def write(folder: Path, lines: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read(data: Any, **options: Any) -> list[tuple[Any, ...]]:
    """Returns label, numbers and keys by slot of each row."""
    files, format = opened(data, SCHEMA, None)
    dataset = QueueDataset(SCHEMA, batch_size=100, format=format, **options)
    dataset.set_filelist(files)
    rows = joined(list(dataset))
    assert rows.labels is not None
    keys = [rows.keys[i:j].tolist() for i, j in zip(rows.offsets, rows.offsets[1:], strict=False)]
    return [
        (rows.labels[row], rows.dense[row].tolist(), keys[3 * row : 3 * row + 3])
        for row in range(rows.size)
    ]


def keys(*slots: list[str]) -> list[list[int]]:
    return [[key_of(i, each.encode()) for each in values] for i, values in enumerate(slots, 1)]


LINES = [
    {"click": 1, "user": "ann", "device": {"os": "ios", "age": 3}, "tags": ["a", "b"], "price": 1},
    {"click": 0, "user": "é", "device": None, "tags": [], "price": 2.5, "more": [{"x": 1}]},
    {"click": 0, "device": {"age": None}, "tags": None, "price": None},
]
ROWS = [
    (1.0, [1.0, 3.0], keys(["ann"], ["ios"], ["a", "b"])),
    (0.0, [2.5, 0.0], keys(["é"], [""], [])),
    (0.0, [0.0, 0.0], keys([""], [""], [""])),
]
# Which Arrow does not read in the types of the lines before; and what they mean.
ODD = [
    ({"click": 1, "user": 7, "tags": "c", "device": {"age": 1.5}}, keys(["7"], [""], ["c"])),
    ({"click": 1, "user": 2**70, "tags": [1, "c"]}, keys([str(2**70)], [""], ["1", "c"])),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.NDJSON", "rows.json"])
def test_objects_are_columns_with_dotted_names_and_arrays_lists(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path, LINES, name)) == ROWS


def test_lines_mean_the_same_beside_others_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path, [*LINES, *(line for line, _ in ODD), "", "[1]", "{", '{"click": 1} {}'])

    found = read(path, bad_row_limit=9)

    assert found[:3] == ROWS
    assert [keys for _, _, keys in found[3:]] == [keys for _, keys in ODD]
    assert found[3][1] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", r"not a JSON object: '\{'"),
        ("[1]", r"not a JSON object: '\[1\]'"),
        ({"click": 1, "user": 1.5}, r"column 'user' is '1\.5', expected text or a whole number"),
        ({"click": 1, "user": True}, "column 'user' is 'true', expected text"),
        ({"click": 1, "tags": [[1]]}, r"column 'tags' is '\[\[1\]\]', .* or a list of these"),
        ({"click": 1, "tags": {"a": 1}}, r"column 'tags' is"),
        ({"click": 1, "price": "1"}, "column 'price' is '\"1\"', expected a number"),
        ({"click": 1, "device": "x"}, "column 'device.age' lies in '\"x\"', expected an object"),
        ({"click": 2}, "column 'click' is '2', expected 0 or 1"),
        ({"price": 2}, "the label is missing"),
        ('{"click": 1, "price": 1e999}', "column 'price' is inf, expected a finite number"),
        ('{"click": 1, "user": "\\ud800"}', "column 'user' is "),
    ],
)
def test_malformed_line_is_named_with_its_number(tmp_path: Path, line: Any, fault: str) -> None:
    path = write(tmp_path, [*LINES, line, LINES[0]])

    with pytest.raises(BadRowError, match=rf"^{path}:4: {fault}"):
        read(path)
    assert read(path, bad_row_limit=1) == [*ROWS, ROWS[0]]


VALUES = st.none() | st.text(max_size=3) | st.integers(-9, 9) | st.integers(2**63 - 1, 2**64)


@settings(max_examples=60)
@given(
    lines=st.lists(
        st.fixed_dictionaries(
            {"click": st.sampled_from([0, 1])},
            optional={
                "user": VALUES,
                "tags": st.none() | st.lists(VALUES, max_size=3),
                "price": st.none() | st.integers(-5, 5) | st.sampled_from([0.5, 2.25]),
                "device": st.none() | st.fixed_dictionaries({}, optional={"os": VALUES}),
            },
        ),
        min_size=1,
        max_size=6,
    )
)
def test_rows_are_those_of_pythons_json(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]]
) -> None:
    def texts(value: Any) -> list[str]:
        return [str(each) for each in (value if isinstance(value, list) else [value])]

    def slot(value: Any) -> list[str]:
        return [""] if value is None else [each.replace("None", "") for each in texts(value)]

    path = write(tmp_path_factory.mktemp("json"), lines)
    expected = [
        (
            line["click"],
            [line.get("price") or 0.0, 0.0],
            keys(
                slot(line.get("user")),
                slot((line.get("device") or {}).get("os")),
                slot(line.get("tags")),
            ),
        )
        for line in lines
    ]

    assert read(path) == expected


def test_column_that_no_row_has_is_missing_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [{"click": 1, "usr": "a", "price": 1, "tags": []}])

    with caplog.at_level(logging.WARNING):
        assert [keys for _, _, keys in read(path)] == [keys([""], [""], [])]

    told = [each for each in caplog.messages if "no row at the start" in each]
    assert len(told) == 3
    assert "has 'user': read as missing, did you mean 'usr'?" in told[1]


def test_json_that_is_no_object_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(LINES, indent=1))

    with pytest.raises(DataError, match="one object a line: write it so, as pandas"):
        read(tmp_path / "rows.json")


def test_name_inside_an_object_and_beside_it_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [{"click": 1, "device.os": "x", "device": {"os": "y"}}])

    with pytest.raises(DataError, match=r"column 'device\.os' occurs twice"):
        read(path)


def test_kinds_of_values_are_those_of_the_first_lines(tmp_path: Path) -> None:
    values = values_of_files([str(write(tmp_path, LINES))], SCHEMA, None)
    numbers = values_of_files([str(write(tmp_path, [{"user": 7}], "n.jsonl"))], SCHEMA, None)

    assert values.has_lists("tags")
    assert not values.has_lists("user")
    assert values.meaning("user").number_fault
    assert numbers.meaning("user").whole_number == "digits"


NESTED = Schema(
    dense=tuple(DenseColumn(name=f"v[{index}]") for index in range(2)),
    slots=("a.b.c", "d.e.f", "tags", "codes"),
    split={"codes": ","},
    label="click",
)


def batch_of(data: Any, **options: Any) -> tuple[Batch, int]:
    """Returns the rows of `NESTED`, and the number of malformed ones."""
    files, format = opened(data, NESTED, None)
    dataset = QueueDataset(NESTED, batch_size=9999, format=format, **options)
    dataset.set_filelist(files)
    (batch,) = dataset
    return batch, dataset.bad_rows


def test_lists_and_vectors_that_begin_late_are_those_of_parquet(tmp_path: Path) -> None:
    early = {"click": 0, "a.b": {"c": "x"}, "d": {"e.f": "y"}, "tags": None, "v": None}
    late = {**early, "tags": ["p", None, "ü"], "v": [1.5, 2.0], "codes": "p,,q"}
    rows = [{"codes": "", **early}] * 1200 + [late, {**late, "tags": [], "codes": ","}]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")

    (found, bad), (other, _) = (
        batch_of(str(path)) for path in (write(tmp_path, rows), tmp_path / "rows.parquet")
    )

    assert bad == 0
    np.testing.assert_array_equal(found.dense, other.dense)
    np.testing.assert_array_equal(found.keys, other.keys)
    np.testing.assert_array_equal(found.offsets, other.offsets)
    keys_of_late = found.keys[found.offsets[4 * 1200] : found.offsets[4 * 1201]].tolist()
    texts = [(1, "x"), (2, "y"), (3, "p"), (3, ""), (3, "ü"), (4, "p"), (4, "q")]
    assert keys_of_late == [key_of(slot, each.encode()) for slot, each in texts]
    assert found.dense[-1].tolist() == [1.5, 2.0]


@pytest.mark.parametrize("num_before", [0, 1200])
def test_odd_rows_alone_are_malformed(
    tmp_path: Path, num_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"click": 1, "a": {"b.c": "x"}, "tags": [1, "b"], "v": [1, 2]}
    odd = [
        {**good, "v": ["x", 2]},
        {**good, "v": 3},
        {**good, "v": [1]},
        {**good, "v[0]": 1},
        {**good, "a.b": {"c": "z"}},
        {**good, "a": 7},
        {**good, "tags": [1.5]},
        {**good, "click": [1]},
        '{"click": 1} {"click": 1}',
        "",
    ]
    fine = [{**good, "click": each, "\ud800": 1} for each in (True, 1.0, "1")]
    path = write(tmp_path, [*[good] * num_before, *fine, *odd, good])

    with caplog.at_level(logging.WARNING):
        rows, bad = batch_of(str(path), bad_row_limit=len(odd))

    first = num_before + len(fine) + 1
    assert (rows.size, bad) == (num_before + 4, len(odd))
    assert rows.labels is not None
    assert rows.labels.tolist() == [1.0] * rows.size
    places = [each.rpartition("place=")[2] for each in caplog.messages if "place=" in each]
    assert places == [str(first + index) for index in range(5)]  # later ones are not logged
    with pytest.raises(BadRowError, match=f":{first + len(odd) - 1}: not a JSON object: ''"):
        batch_of(str(path), bad_row_limit=len(odd) - 1)


def test_kinds_of_a_slot_with_lists_in_some_rows_are_lists_of_its_values(tmp_path: Path) -> None:
    path = write(tmp_path, [{"user": 7, "tags": each} for each in (1, [], None, [2, 3])])

    values = values_of_files([str(path)], SCHEMA, None)

    assert values.has_lists("tags")
    assert values.meaning("tags").whole_number == "digits"


@pytest.mark.parametrize("suffix", ["parquet", "feather", "orc"])
def test_structs_of_columns_have_dotted_names(tmp_path: Path, suffix: str) -> None:
    frame = pd.DataFrame(LINES).drop(columns="more")
    path = tmp_path / f"rows.{suffix}"
    getattr(frame, f"to_{suffix}")(path)

    assert read(path) == ROWS
    assert read(frame) == ROWS
    assert read(LINES_AS_ROWS) == ROWS


LINES_AS_ROWS = [{name: line.get(name) for name in LINES[0]} for line in LINES]


def test_fields_of_fields_are_columns() -> None:
    schema = Schema(dense=(DenseColumn(name="a.b.c"),), slots=("a.d",), label="click")
    rows = [
        {"click": 1, "a": {"b": {"c": 2.0}, "d": "x"}},
        {"click": 0, "a": {"b": None, "d": "y"}},
    ]

    files, format = opened(rows, schema, None)
    dataset = QueueDataset(schema, batch_size=9, format=format)
    dataset.set_filelist(files)
    (batch,) = dataset

    assert batch.dense.tolist() == [[2.0], [0.0]]
    assert batch.keys.tolist() == [key_of(1, b"x"), key_of(1, b"y")]


def test_blocks_and_positions_are_those_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed pass reads the rest, whichever way its blocks are read."""
    lines = [*LINES * 30, ODD[0][0], *LINES * 5]
    path = write(tmp_path, lines)
    monkeypatch.setattr(json_lines, "line_blocks", _small_blocks(json_lines.line_blocks))

    dataset = QueueDataset(SCHEMA, batch_size=7)
    dataset.set_filelist([str(path)])
    batches = list(dataset.positioned())
    _, start = batches[8]
    rest = [batch for batch, _ in dataset.positioned(start)]

    assert sum(batch.size for batch, _ in batches) == len(lines)
    np.testing.assert_array_equal(
        np.concatenate([batch.keys for batch in rest]),
        np.concatenate([batch.keys for batch, _ in batches[9:]]),
    )


def _small_blocks(line_blocks: Any) -> Any:
    return lambda split, offset=None: line_blocks(split, offset, 512)
