"""Schemas: invalid entries, files, scaling of numbers."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.ctr_model.schema import DenseColumn, Schema, SchemaError, criteo_schema


def small() -> dict[str, object]:
    return {
        "hash_version": 1,
        "slots": ["user", "item"],
        "dense": [{"name": "age", "shift": 18, "scale": 80.0}, {"name": "count"}],
    }


def every_transform() -> Schema:
    return Schema(
        dense=(
            DenseColumn(name="price", transform="log1p", shift=-0.5, scale=2.5, missing=-1.0),
            DenseColumn(name="age"),
            DenseColumn(
                name="visits", transform="min_max", min=-3, max=1e22, missing_indicator=True
            ),
            DenseColumn(name="views", transform="quantile", boundaries=(0.0, 0.0, 1 / 3)),
        ),
        slots=("user", "item"),
    )


def test_label_is_kept_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    schema = replace(every_transform(), label='a "click"', weight="w", id="user")
    path.write_text(schema.to_toml(), encoding="utf-8")

    assert Schema.load(path) == schema == Schema.from_dict(schema.to_dict())
    assert schema.fingerprint != every_transform().fingerprint
    assert "label" not in every_transform().to_dict()


def test_several_labels_are_kept_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    schema = Schema.from_dict(small() | {"labels": ["click", "bought"], "weight": "w"})
    path.write_text(schema.to_toml({"weight": "a comment"}))

    assert Schema.load(path) == schema
    assert schema.labels == ("click", "bought")
    assert (schema.label, schema.other_labels) == ("click", ("bought",))
    assert schema.fingerprint != replace(schema, other_labels=()).fingerprint
    assert replace(schema, other_labels=()) == Schema.from_dict(
        small() | {"label": "click", "weight": "w"}
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"labels": []}, "labels is empty"),
        ({"labels": "click"}, "labels"),
        ({"labels": ["click"], "label": "click"}, "'label' and 'labels' are both set"),
        ({"labels": ["click", "click"]}, "label 'click'"),
        ({"labels": ["click", "item"]}, "'item' is the label and a feature"),
        (
            {"labels": ["click", "bought"], "weight": "bought"},
            "'bought' is the weight and also a label",
        ),
        ({"labels": ["click", "bought"], "id": "bought"}, "'bought' is the id and also the label"),
    ],
)
def test_wrong_labels_are_named(entries: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_dict(small() | entries)


def test_shared_keys_are_kept_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    schema = replace(
        every_transform(), slots=("item", "history", "seen"), shares={"history": "item"}
    )
    path = tmp_path / "schema.toml"
    path.write_text(schema.to_toml(), encoding="utf-8")

    assert Schema.from_toml(path) == schema == Schema.from_dict(schema.to_dict())
    assert schema.slot_numbers == (1, 1, 3)
    assert hash(schema) is not None
    assert schema.fingerprint != replace(schema, shares={}).fingerprint
    assert schema.fingerprint != replace(schema, shares={"seen": "item"}).fingerprint


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"item": "history"}, "shares.item: the schema has no slot 'history', only item, seen"),
        ({"items": "item"}, "the schema has no slot 'items', did you mean 'item'"),
        (
            {"item": "seen", "seen": "item"},
            "shares.item is 'seen', which itself shares .* of 'item'",
        ),
        ({"item": "item"}, "shares.item is 'item', which itself shares the keys of 'item'"),
    ],
)
def test_keys_are_shared_with_a_slot_that_has_its_own(shares: dict, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        replace(every_transform(), slots=("item", "seen"), shares=shares)


@pytest.mark.parametrize("key", ["shares", "split"])
@pytest.mark.parametrize("texts", [["item"], {"seen": 1}, {"seen": ""}])
def test_what_is_no_table_of_slots_is_refused(key: str, texts: object) -> None:
    data = {**every_transform().to_dict(), "slots": ["item", "seen"], key: texts}

    with pytest.raises(SchemaError, match=rf"{key}.*, expected a"):
        Schema.from_dict(data)


@pytest.mark.parametrize("separator", ["", 1, None])
def test_separator_that_is_no_text_is_refused(separator: Any) -> None:
    with pytest.raises(SchemaError, match=rf"split\.item is {separator!r}, expected a non-empty"):
        replace(every_transform(), slots=("item",), split={"item": separator})


def test_separators_are_kept_and_part_of_the_fingerprint(tmp_path: Path) -> None:
    slots = ("item", "history")
    schema = replace(every_transform(), slots=slots, split={"history": "|"})
    path = tmp_path / "schema.toml"
    path.write_text(schema.to_toml(), encoding="utf-8")

    assert Schema.from_toml(path) == schema == Schema.from_dict(schema.to_dict())
    assert hash(schema) is not None
    prints = {replace(schema, split=each).fingerprint for each in ({}, {"history": ","})}
    assert len(prints - {schema.fingerprint}) == 2
    with pytest.raises(SchemaError, match=r"split: the schema has no slot 'itm', .* 'item'"):
        replace(schema, split={"itm": "|"})


def test_reading_without_labels_is_the_same_schema() -> None:
    schema = replace(every_transform(), label="click")
    optional = replace(schema, is_for_prediction=True)

    assert optional == schema
    assert optional.fingerprint == schema.fingerprint


def test_file_keeps_any_name(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    names = ('a "quoted" \\ name', "caf\u00e9", "\U0001f600", "line\nbreak", "\x7f", "a.b = c")
    path.write_text(Schema(dense=(), slots=names).to_toml(), encoding="utf-8")

    assert Schema.load(path).slots == names


def test_copy_and_pickle_scale_alike() -> None:
    """A schema travels to other processes, and `replace` makes another one of it."""
    schema, values = every_transform(), np.ones((1, 4))
    longer = replace(schema, dense=(*schema.dense, DenseColumn(name="more")))

    assert pickle.loads(pickle.dumps(schema)).scale_dense(values).tolist() == (
        schema.scale_dense(values).tolist()
    )
    assert longer.num_dense == schema.num_dense + 1 == 6
    assert len({schema, every_transform(), longer}) == 2


def test_criteo_has_13_numbers_and_26_slots_in_the_order_of_the_data() -> None:
    schema = criteo_schema()

    assert [column.name for column in schema.dense] == [f"I{n}" for n in range(1, 14)]
    assert schema.slots == tuple(f"C{n}" for n in range(1, 27))
    assert schema.dense[11] == DenseColumn(name="I12", transform="log1p", shift=7.556, scale=2.788)


def test_min_max_schema_of_criteo_has_the_constants_of_the_tutorial() -> None:
    schema = Schema.load("criteo_min_max")

    assert schema.slots == criteo_schema().slots
    assert [column.name for column in schema.dense] == [f"I{n}" for n in range(1, 14)]
    assert {column.transform for column in schema.dense} == {"min_max"}
    assert [column.min for column in schema.dense] == [0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    spans = [column.span[1] for column in schema.dense]
    assert spans == [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SchemaError, match=r"no schema 'crite0'.*criteo"):
        Schema.load("crite0")


@pytest.mark.parametrize("content", [b"slots = [", b"slots = '\xff'", b"hash_version = 1"])
def test_wrong_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(content)

    with pytest.raises(SchemaError, match=r"wrong\.toml"):
        Schema.load(path)


def test_a_schema_without_numbers_names_none(tmp_path: Path) -> None:
    (tmp_path / "clicks.toml").write_text('hash_version = 1\nslots = ["user"]\n')

    assert Schema.load(tmp_path / "clicks.toml") == Schema(dense=(), slots=("user",))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"cannot read schema '{tmp_path}'"):
        Schema.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slotz": ["a"]}, r"unknown key 'slotz', did you mean 'slots'\?"),
        ({"dense": [{"name": "a", "shfit": 1}]}, r"unknown key 'shfit', did you mean 'shift'\?"),
        ({"hash_version": 2}, "feature hash version 2, but this package has version 1"),
        ({"hash_version": True}, "hash_version is True, expected a whole number"),
        ({"hash_version": None}, "hash_version is None, .* a new schema says hash_version = 1$"),
        ({"slots": []}, "no slots"),
        ({"slots": "user"}, "slots is 'user', expected a list"),
        ({"slots": ["user", 3]}, "slots is 3, expected a non-empty string"),
        ({"slots": ["user", "user"]}, "slot 'user' is listed twice"),
        ({"label": ""}, "label is '', expected a non-empty string"),
        ({"label": ["click"]}, r"label is \['click'\], expected a non-empty string"),
        ({"label": "item"}, "column 'item' is the label and a feature"),
        ({"weight": "age"}, "column 'age' is the weight and also a label or feature"),
        ({"label": "x", "weight": "x"}, "column 'x' is the weight and also a label or feature"),
        ({"label": "x", "id": "x"}, "column 'x' is the id and also the label or weight"),
        ({"label": "age"}, "column 'age' is the label and a feature"),
        ({"lable": "click"}, r"unknown key 'lable', did you mean 'label'\?"),
        ({"dense": None}, "dense is None, expected a list"),
        ({"dense": ["age"]}, "dense column is 'age', expected a table"),
        ({"dense": [{}]}, "name is None"),
        ({"dense": [{"name": "a"}, {"name": "a"}]}, "dense column 'a' is listed twice"),
    ],
)
def test_wrong_entry_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_dict(small() | change)


def test_fingerprint_is_the_same_for_defaults_written_out() -> None:
    brief = Schema.from_dict(small())
    written_out = Schema.from_dict(brief.to_dict())
    of_whole_numbers = Schema(
        dense=(DenseColumn(name="age", shift=18, scale=80), DenseColumn(name="count")),
        slots=("user", "item"),
    )

    assert brief.fingerprint == written_out.fingerprint == of_whole_numbers.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"slots": ["item", "user"]},
        {"dense": [{"name": "age", "shift": 18, "scale": 80.0}]},
        {"dense": [{"name": "age", "shift": 18, "scale": 80.5}, {"name": "count"}]},
        {
            "dense": [
                {"name": "age", "shift": 18, "scale": 80},
                {"name": "count", "missing_indicator": True},
            ]
        },
        {
            "dense": [
                {"name": "age", "transform": "min_max", "min": 18, "max": 98},
                {"name": "count"},
            ]
        },
    ],
    ids=["order of slots", "fewer numbers", "scale", "indicator", "transform"],
)
def test_fingerprint_changes_with_the_schema(change: dict[str, object]) -> None:
    schema = Schema.from_dict(small())
    changed = Schema.from_dict(small() | change)

    assert schema.fingerprint != changed.fingerprint


def test_fingerprint_of_criteo_is_pinned() -> None:
    """Another value means that models of the past no longer fit their data."""
    assert criteo_schema().fingerprint == (
        "df4dda3837b2e2c7fb56be588d5acf963cd3f2dbcaf1c6c64f84ef4192f5b98b"
    )


def test_fingerprint_of_a_file_from_before_indicators_is_pinned() -> None:
    """Every setting that a schema could have then, with the fingerprint that it had."""
    columns = [
        {"name": "age", "shift": 18, "scale": 80.0},
        {"name": "count", "transform": "log1p", "shift": 0.5, "scale": 2, "missing": -1},
    ]

    assert Schema.from_dict(small() | {"dense": columns}).fingerprint == (
        "283eb62dfece14ecbd31ff8f4193c4347a220f3ff5475105b5320e6f830ac0a9"
    )


def test_slot_is_found_by_name() -> None:
    schema = Schema.from_dict(small())

    assert [schema.slot_index(name) for name in schema.slots] == [0, 1]
    with pytest.raises(SchemaError, match="no slot 'itm', did you mean 'item'"):
        schema.slot_index("itm")


def test_number_that_float32_does_not_hold_is_told_also_where_its_logarithm_is_one() -> None:
    schema = Schema(dense=(DenseColumn(name="age", transform="log1p"),), slots=("user",))
    numbers = np.array([[1.0], [1e39], [np.nan], [3.4e38], [-1e39], [-3.4e38]])

    faults = schema.overflows(numbers, schema.scale_dense(numbers))

    assert faults == {
        1: "column 'age' is 1e+39, beyond the range of float32",
        4: "column 'age' is -1e+39, beyond the range of float32",
    }


def test_number_that_the_largest_of_float32_is_nearest_to_is_held() -> None:
    """Half a step of float32 further, it would be infinity."""
    schema = Schema(dense=(DenseColumn(name="age", transform="log1p"),), slots=("user",))
    nearest = float(np.finfo(np.float32).max) + 2.0**102
    numbers = np.array([[nearest], [-nearest], [nearest + 2.0**102], [-nearest - 2.0**102]])

    faults = schema.overflows(numbers, schema.scale_dense(numbers))

    assert list(faults) == [2, 3]
