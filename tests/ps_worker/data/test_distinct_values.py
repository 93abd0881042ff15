"""Values of a slot with the keys that training knows them by."""

from pathlib import Path

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.distinct_values import DistinctValues
from tests.reference.features import key_of


def test_slot_that_shares_the_keys_of_another_is_hashed_as_that_one(tmp_path: Path) -> None:
    path = tmp_path / "shown.csv"
    path.write_text("user,last,item\nada,red,blue\nbob,green,blue\n")
    schema = Schema(dense=(), slots=("user", "item", "last"), shares={"last": "item"})

    found = {
        slot: dict(
            pair
            for block in DistinctValues([str(path)], schema, slot, bad_rows=BadRows())
            for pair in zip(block[0].to_pylist(), block[1].tolist(), strict=True)
        )
        for slot in ("item", "last")
    }

    assert found == {
        "item": {b"blue": key_of(2, b"blue")},
        "last": {b"red": key_of(2, b"red"), b"green": key_of(2, b"green")},
    }


def test_value_of_any_earlier_file_is_not_new(tmp_path: Path) -> None:
    schema, texts = Schema(dense=(), slots=("item",)), ("red\nblue\ngray\nblack", "white")
    paths = [tmp_path / f"{number}.csv" for number in range(3)]
    for path, text in zip(paths, (*texts, "\n".join(texts)), strict=True):
        path.write_text(f"item\n{text}\n")
    values = DistinctValues(list(map(str, paths)), schema, "item", bad_rows=BadRows())

    found = [value.decode() for block, _ in values for value in block.to_pylist()]

    assert found == "\n".join(texts).split()
    assert (values.rows, values.distinct, values.collisions) == (10, 5, 0)


def test_malformed_rows_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item\nred\na,b\nblue\nc,d\n")
    schema = Schema(dense=(), slots=("item",))

    within, beyond = (
        DistinctValues([str(path)], schema, "item", bad_rows=BadRows(limit=limit))
        for limit in (2, 1)
    )

    assert [value for values, _ in within for value in values.to_pylist()] == [b"red", b"blue"]
    with pytest.raises(BadRowError, match=r"items\.csv"):
        list(beyond)
