"""Rows in memory: stored rows are returned in any order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data import blocks as blocks_module
from ctr_ps.ps_worker.data import rows_in_memory
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.global_shuffle import pack_rows
from ctr_ps.ps_worker.data.rows_in_memory import MAX_KEYS, RowsInMemory, SlotSwap
from tests.support.rows import (
    NUM_DENSE,
    NUM_SLOTS,
    assert_same_rows,
    numbered_lists,
    numbered_rows,
    numbers_of,
    resident_bytes,
)


def weighted_rows(numbers) -> Batch:
    return numbered_rows(numbers, weights=True)


KINDS = [numbered_rows, numbered_lists, weighted_rows]


def rows_of(*batches: Batch) -> RowsInMemory:
    rows = RowsInMemory(NUM_DENSE, NUM_SLOTS)
    for batch in batches:
        rows.extend(batch, source=0)
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_gathered_in_any_order_and_any_number(kind) -> None:
    rows = rows_of(kind(range(50)), kind(range(50, 80)))

    for index in ([3, 79, 3, 0], [], range(80)):
        assert_same_rows(kind(list(index)), rows.gather(np.array(index, np.uint32)))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=15),
    lists_from=st.integers(0, 15),
)
def test_order_is_that_of_the_sources_however_they_came(sizes, lists_from) -> None:
    """Some batches have one key a slot, and later ones lists."""
    rows = RowsInMemory(NUM_DENSE, NUM_SLOTS)
    batches: list[tuple[int, Batch]] = []
    start = 0
    for place, (source, size) in enumerate(sizes):
        kind = numbered_rows if place < lists_from else numbered_lists
        batches.append((source, kind(range(start, start + size))))
        rows.extend(batches[-1][1], source)
        start += size

    in_order = rows.in_order()

    expected = [batch for _, batch in sorted(batches, key=lambda each: each[0])]
    if expected:
        assert_same_rows(joined(expected), rows.gather(in_order))
    assert rows.size == start


def test_rows_without_labels_and_without_numbers() -> None:
    rows = RowsInMemory(0, NUM_SLOTS)
    given_rows = replace(numbered_rows(range(5), labels=False), dense=np.empty((5, 0), np.float32))
    rows.extend(given_rows, source=0)

    assert_same_rows(given_rows, rows.gather(rows.in_order()))


def test_rows_with_and_without_labels_do_not_mix() -> None:
    rows = rows_of(numbered_rows(range(3)))

    with pytest.raises(DataError, match="some rows have labels and others have none"):
        rows.extend(numbered_rows(range(3, 6), labels=False), source=0)

    assert_same_rows(numbered_rows(range(3)), rows.gather(rows.in_order()))


def test_batch_of_more_keys_than_offsets_count_is_refused(monkeypatch) -> None:
    rows = rows_of(numbered_lists(range(100)))
    monkeypatch.setattr(blocks_module, "MAX_BATCH_KEYS", 400)

    assert len(rows.gather(np.arange(80)).keys) < 400
    with pytest.raises(DataError, match="100 rows have 450 keys, expected up to 400 in a batch"):
        rows.gather(np.arange(100))


def test_list_that_is_too_long_is_refused() -> None:
    rows = rows_of(numbered_rows(range(3)))
    keys = np.zeros(MAX_KEYS + 2, np.uint64)
    long = Batch(
        labels=np.ones(1, np.float32),
        dense=np.ones((1, NUM_DENSE), np.float32),
        keys=keys,
        offsets=np.array([0, 0, MAX_KEYS + 1, MAX_KEYS + 2], np.int32),
        num_slots=NUM_SLOTS,
    )

    with pytest.raises(DataError, match="slot 2 of a row has 65536 values"):
        rows.extend(long, source=0)

    assert_same_rows(numbered_rows(range(3)), rows.gather(rows.in_order()))


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_slots_are_those_of_other_rows(kind) -> None:
    rows = rows_of(kind(range(6)))
    swap = SlotSwap(np.array([5, 4, 3, 2, 1, 0], np.uint32), np.array([True, False, True]))

    swapped = rows.gather(np.array([1, 0, 5], np.uint32), swap)

    own, given_rows = kind([1, 0, 5]), kind([4, 5, 0])
    np.testing.assert_array_equal(own.dense, swapped.dense)
    for row in range(3):
        for slot, source in enumerate([given_rows, own, given_rows]):
            assert slot_keys(source, row, slot) == slot_keys(swapped, row, slot)


def slot_keys(rows: Batch, row: int, slot: int) -> list[int]:
    place = row * NUM_SLOTS + slot
    return rows.keys[rows.offsets[place] : rows.offsets[place + 1]].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_columns(kind) -> None:
    batch = kind(range(100))
    rows = rows_of(batch)

    sizes = rows.bytes_of(rows.in_order())

    header = len(pack_rows(kind([])))
    assert header + sizes.sum() == len(pack_rows(batch))
    starts = 8 * rows.size if kind is numbered_lists else 0
    assert rows.size_bytes == sizes.sum() + starts


@pytest.mark.parametrize("kind", KINDS)
def test_released_rows_leave_the_others_as_they_are(kind) -> None:
    rows = RowsInMemory(NUM_DENSE, NUM_SLOTS)
    rows.extend(kind(range(5_000)), source=1)
    rows.extend(kind(range(5_000, 9_000)), source=0)
    order = rows.in_order()

    rows.release(order[3_000:6_500])  # two runs of rows
    rows.release(order[:0])

    kept = rows.gather(np.concatenate([order[:3_000], order[6_500:]]))
    expected = [*range(5_000, 8_000), *range(2_500, 5_000)]
    np.testing.assert_array_equal(expected, numbers_of(kept))


def test_release_gives_memory_back() -> None:
    few = rows_of(numbered_rows(range(10)))
    few.release(few.in_order())  # compiles what is measured below
    rows = rows_of(
        *(numbered_rows(range(start, start + 100_000)) for start in range(0, 10**6, 10**5))
    )
    stretches = np.array_split(rows.in_order(), 100)
    before = resident_bytes()

    for stretch in stretches:  # whose own arrays are small beside what is released
        rows.release(stretch)

    assert before - resident_bytes() > 0.9 * rows.size_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_rows_grow_by_copying_where_address_space_is_short(kind, monkeypatch) -> None:
    monkeypatch.setattr(rows_in_memory, "_REGION_BYTES", 256)

    rows = rows_of(kind(range(10)), kind(range(10, 400)))

    assert_same_rows(kind(range(400)), rows.gather(rows.in_order()))
