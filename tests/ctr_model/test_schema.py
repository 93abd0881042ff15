"""Schemas: what they refuse, and what the model sees of a number."""

import math
from pathlib import Path

import numpy as np
import pytest

from ctr_model.schema import DenseColumn, Schema, SchemaError, criteo_schema


def small() -> dict[str, object]:
    return {
        "hash_version": 1,
        "slots": ["user", "item"],
        "dense": [{"name": "age", "shift": 18, "scale": 80.0}, {"name": "count"}],
    }


def test_round_trip_keeps_every_value() -> None:
    schema = Schema(
        dense=(
            DenseColumn(name="price", transform="log1p", shift=-0.5, scale=2.5, missing=-1.0),
            DenseColumn(name="age"),
        ),
        slots=("user", "item"),
    )

    assert Schema.from_dict(schema.to_dict()) == schema


def test_criteo_has_13_numbers_and_26_slots_in_the_order_of_the_data() -> None:
    schema = criteo_schema()

    assert [column.name for column in schema.dense] == [f"I{n}" for n in range(1, 14)]
    assert schema.slots == tuple(f"C{n}" for n in range(1, 27))
    assert schema.dense[11] == DenseColumn(name="I12", transform="log1p", shift=7.556, scale=2.788)


def test_schema_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('hash_version = 1\nslots = ["a", "b"]\ndense = []\n', encoding="utf-8")

    assert Schema.load("criteo") == criteo_schema()
    assert Schema.load(str(path)).slots == ("a", "b")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SchemaError, match=r"no schema 'crite0'.*criteo"):
        Schema.load("crite0")


@pytest.mark.parametrize("content", [b"slots = [", b"slots = '\xff'", b"hash_version = 1"])
def test_wrong_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(content)

    with pytest.raises(SchemaError, match=r"wrong\.toml"):
        Schema.load(path)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"cannot read schema '{tmp_path}'"):
        Schema.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slotz": ["a"]}, r"unknown key 'slotz', did you mean 'slots'\?"),
        ({"dense": [{"name": "a", "shfit": 1}]}, r"unknown key 'shfit', did you mean 'shift'\?"),
        ({"hash_version": 2}, "feature hash version 2, this package has version 1"),
        ({"hash_version": True}, "hash_version is True, expected a whole number"),
        ({"hash_version": None}, "hash_version is None, expected a whole number"),
        ({"slots": []}, "no slots"),
        ({"slots": "user"}, "slots is 'user', expected a list"),
        ({"slots": ["user", 3]}, "slots is 3, expected a text"),
        ({"slots": ["user", "user"]}, "slot 'user' is listed twice"),
        ({"dense": None}, "dense is None, expected a list"),
        ({"dense": ["age"]}, "dense column is 'age', expected a table"),
        ({"dense": [{}]}, "name is None"),
        ({"dense": [{"name": "a"}, {"name": "a"}]}, "dense column 'a' is listed twice"),
        ({"dense": [{"name": "a", "scale": 0}]}, "'a': scale is 0"),
        ({"dense": [{"name": "a", "shift": math.nan}]}, "'a': shift is nan, not finite"),
        ({"dense": [{"name": "a", "shift": "1"}]}, "'a': shift is '1', expected a number"),
        ({"dense": [{"name": "a", "missing": True}]}, "missing is True, expected a number"),
        ({"dense": [{"name": "a", "transform": "log"}]}, "'log', expected one of none, log1p"),
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
    ],
    ids=["order of slots", "fewer numbers", "scale"],
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


def test_scaled_number_is_the_transformed_one_shifted_and_divided() -> None:
    schema = Schema(
        dense=(
            DenseColumn(name="min-max", shift=10.0, scale=40.0),
            DenseColumn(name="log", transform="log1p", shift=0.5, scale=2.0),
        ),
        slots=("user",),
    )
    values = np.array([[10.0, 0.0], [50.0, 7.0], [30.0, -7.0]])

    scaled = schema.scale_dense(values)

    log8 = math.log(8.0)
    expected = [[0.0, -0.25], [1.0, (log8 - 0.5) / 2.0], [0.5, (-log8 - 0.5) / 2.0]]
    assert scaled.dtype == np.float32
    np.testing.assert_array_equal(scaled, np.array(expected, np.float32))


def test_missing_number_reads_missing_unscaled() -> None:
    columns = (
        DenseColumn(name="a", shift=5.0, scale=2.0),
        DenseColumn(name="b", transform="log1p", shift=5.0, scale=2.0, missing=-3.0),
    )

    scaled = Schema(dense=columns, slots=("user",)).scale_dense(np.full((1, 2), np.nan))

    assert scaled.tolist() == [[0.0, -3.0]]


def test_slot_is_found_by_name() -> None:
    schema = Schema.from_dict(small())

    assert [schema.slot_index(name) for name in schema.slots] == [0, 1]
    with pytest.raises(SchemaError, match="no slot 'itm', did you mean 'item'"):
        schema.slot_index("itm")
