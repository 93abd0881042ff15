"""Blocks into batches: every row once, in order, with its own keys; positions as texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data import blocks as blocks_module
from ctr_ps.ps_worker.data.blocks import (
    Block,
    DataPosition,
    RowColumnCheck,
    batches,
    joined,
    offsets_of,
    rows_between,
)

NUM_SLOTS = 2
SCHEMA = Schema(dense=(), slots=("user", "item"))
START = DataPosition()

# A row is the numbers of keys in its slots; what it holds follows from its number.
row_counts = st.tuples(st.integers(0, 3), st.integers(0, 3))
split_counts = st.lists(st.lists(row_counts, min_size=1, max_size=7), max_size=4)


def rows_of(counts: Sequence[tuple[int, int]], first: int = 0, has_labels: bool = True) -> Batch:
    numbers = np.arange(first, first + len(counts))
    flat = np.array(counts, np.int64).reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(flat)]).astype(np.int32)
    keys = [
        1000 * number + 10 * slot + index
        for number, slots in zip(numbers.tolist(), counts, strict=True)
        for slot, count in enumerate(slots)
        for index in range(count)
    ]
    return Batch(
        labels=(numbers % 2).astype(np.float32) if has_labels else None,
        dense=numbers[:, None].astype(np.float32),
        keys=np.array(keys, np.uint64),
        offsets=offsets,
        num_slots=NUM_SLOTS,
    )


def plain(rows: Batch) -> list[tuple[float, float, list[list[int]]]]:
    """Returns each row as (label, number, keys of each slot)."""
    keys = [
        rows.keys[start:stop].tolist()
        for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    labels = np.full(rows.size, -1.0) if rows.labels is None else rows.labels
    slots = [keys[row * NUM_SLOTS : (row + 1) * NUM_SLOTS] for row in range(rows.size)]
    return list(zip(labels.tolist(), rows.dense[:, 0].tolist(), slots, strict=True))


def blocks_of(splits: list[list[list[tuple[int, int]]]], start: DataPosition) -> Iterator:
    """Yields the blocks of splits from that at which `start` points; a block's offset is its first row."""
    first = 0
    for split, blocks in enumerate(splits):
        offset = 0
        for counts in blocks:
            is_before = split == start.split and start.offset is not None and offset < start.offset
            if split >= start.split and not is_before:
                yield split, Block(rows_of(counts, first), offset)
            first += len(counts)
            offset += len(counts)


def test_weights_and_ids_stay_with_their_rows() -> None:
    rows = [
        replace(
            rows_of([(1, 1)] * 3, first=first),
            weights=np.arange(first, first + 3, dtype=np.float32),
            ids=np.array([f"row {first + i}" for i in range(3)], np.object_),
        )
        for first in (0, 3)
    ]
    blocks = [(0, Block(block, 0)) for block in rows]

    found = [batch for batch, _ in batches(blocks, 2, START)]

    assert [each.weights.tolist() for each in found] == [[0, 1], [2, 3], [4, 5]]
    assert [each.ids.tolist() for each in found][1] == ["row 2", "row 3"]
    assert [each.weight for each in found] == [1, 5, 9]


def test_format_without_a_place_for_weights_is_refused() -> None:
    """A schema that names weights never trains as if there were none."""
    check = RowColumnCheck(replace(SCHEMA, weight="w"))

    with pytest.raises(
        DataError, match=r"a\.tsv: the schema names 'w' as column of weights, which"
    ):
        check.require("a.tsv", rows_of([(1, 1)]))


@given(splits=st.lists(split_counts, max_size=3), batch_size=st.integers(1, 9))
def test_batches_hold_each_row_once_and_go_on_from_any_position(
    splits: list[list[list[tuple[int, int]]]], batch_size: int
) -> None:
    found = list(batches(blocks_of(splits, START), batch_size, START))

    counts = [row for blocks in splits for block in blocks for row in block]
    assert [row for batch, _ in found for row in plain(batch)] == (
        plain(rows_of(counts)) if counts else []
    )
    assert all(batch.size == batch_size for batch, _ in found[:-1])
    assert all(0 < batch.size <= batch_size for batch, _ in found)
    for number, (_, position) in enumerate(found, start=1):
        again = batches(blocks_of(splits, position), batch_size, position)
        assert [(plain(batch), after) for batch, after in again] == [
            (plain(batch), after) for batch, after in found[number:]
        ]


def test_position_names_epoch_seed_split_block_and_rows() -> None:
    start = DataPosition(epoch=3, seed=4)
    splits = [[[(1, 1)] * 2], [[(1, 1)] * 2, [(1, 1)] * 3]]

    (*_, (_, position)) = batches(blocks_of(splits, start), 3, start)

    assert position == DataPosition(epoch=3, seed=4, split=1, offset=2, skip=3)


def test_batch_inside_a_block_is_a_view() -> None:
    block = Block(rows_of([(1, 1)] * 9), 0)

    first, second = (batch for batch, _ in batches([(0, block)], 4, START) if batch.size == 4)

    for batch in (first, second):
        assert batch.labels is not None
        for own, all_rows in (
            (batch.keys, block.rows.keys),
            (batch.dense, block.rows.dense),
            (batch.labels, block.rows.labels),
        ):
            assert np.shares_memory(own, all_rows)
    assert np.shares_memory(first.offsets, block.rows.offsets)


def test_whole_block_is_its_own_batch() -> None:
    rows = rows_of([(1, 1)] * 4)

    ((batch, _),) = batches([(0, Block(rows, 0))], 4, START)

    assert batch is rows


@pytest.mark.parametrize("splits", [[[[(1, 1)] * 3]], [[[(1, 1)] * 3], [[(1, 1)] * 9]]])
def test_position_beyond_the_end_of_its_split_is_refused(
    splits: list[list[list[tuple[int, int]]]],
) -> None:
    start = DataPosition(split=0, offset=0, skip=5)

    with pytest.raises(DataError, match="beyond the end of its split by 2 rows"):
        list(batches(blocks_of(splits, start), 2, start))


def test_more_keys_than_offsets_count_are_refused(monkeypatch) -> None:
    pieces = [rows_of([(2, 3)]), rows_of([(1, 0), (4, 0)])]
    monkeypatch.setattr(blocks_module, "MAX_BATCH_KEYS", 9)

    with pytest.raises(DataError, match="3 rows have 10 keys, expected up to 9 in a batch"):
        joined(pieces)
    with pytest.raises(DataError, match="2 rows have 10 keys"):
        offsets_of(np.array([[3, 3], [3, 1]]))
    assert offsets_of(np.array([[3, 0], [3, 3]])).tolist() == [0, 3, 3, 6, 9]


def test_slices_and_joins_keep_rows_without_labels() -> None:
    rows = rows_of([(2, 1), (0, 3), (1, 0)], has_labels=False)

    again = joined([rows_between(rows, 0, 1), rows_between(rows, 1, 3)])

    assert again.labels is None
    assert plain(again) == plain(rows)
    assert again.offsets.dtype == np.int32


@pytest.mark.parametrize(
    "position", [DataPosition(), DataPosition(epoch=2, seed=2**62, split=3, offset=4, skip=5)]
)
def test_text_is_read_back(position: DataPosition) -> None:
    assert DataPosition.from_json(position.to_json()) == position


def test_position_of_an_old_checkpoint_is_read() -> None:
    """Positions once called the split a part."""
    old = DataPosition(epoch=2, split=3).to_json().replace('"split"', '"part"')

    assert DataPosition.from_json(old) == DataPosition(epoch=2, split=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object with epoch, seed, split, offset, skip"),
        ('{"epoch": 1}', "expected an object with epoch, seed"),
        (DataPosition().to_json().replace('"skip": 0', '"skip": -1'), "skip is -1, expected"),
        (
            DataPosition().to_json().replace('"split": 0', '"split": null'),
            "split is None, expected",
        ),
        (
            DataPosition().to_json().replace('"split": 0', '"split": true'),
            "split is True, expected",
        ),
        (DataPosition().to_json().replace("null", '"x"'), "offset is 'x', expected"),
    ],
)
def test_what_is_no_position_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataPosition.from_json(text)
