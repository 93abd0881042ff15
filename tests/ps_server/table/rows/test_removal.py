"""Rows that are removed one by one: what a dictionary does, in an index that is checked slot by slot."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.memory.hash_index import (
    INITIAL_SLOTS,
    MAX_LOAD_PERCENT,
    TableArrays,
    find_row,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.memory.layout import KEY_COLUMNS, RowLayout
from ctr_ps.ps_server.table.rows.regions import RowRegions
from ctr_ps.ps_server.table.rows.removal import remove_row
from tests.reference.partition import unmix64

MOST_ROWS = INITIAL_SLOTS * MAX_LOAD_PERCENT // 100


def regions_of(num_shards: int) -> RowRegions:
    return RowRegions(
        RowLayout(dim=3, state_width=0),
        num_shards=num_shards,
        shards=range(num_shards),
        num_subscribers=1,
    )


@kernel
def play(table: TableArrays, keys: Keys, numbers: NDArray[np.int64], start: int) -> int:
    """Removes a key that is there, else inserts it with its number as weights and change word.

    Stops where there is no room, and returns where.
    """
    for i in range(start, keys.size):
        hashed = mix64(keys[i])
        shard = shard_of_hash(table, hashed)
        row = find_row(table, shard, hashed, keys[i])
        if row >= 0:
            remove_row(table, shard, row)
        elif has_room(table, shard):
            row = insert_row(table, shard, hashed, keys[i])
            table.slab[row, KEY_COLUMNS : KEY_COLUMNS + 3] = np.float32(numbers[i])
            word = row + shard * (table.change_rows - table.region_rows)
            table.change_words[word, 0] = np.uint64(numbers[i])
        else:
            return i
    return keys.size


@kernel
def all_rows(table: TableArrays, keys: Keys) -> NDArray[np.int64]:
    """Returns the row of each key, or -1."""
    rows = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        hashed = mix64(keys[i])
        rows[i] = find_row(table, shard_of_hash(table, hashed), hashed, keys[i])
    return rows


def toggle(regions: RowRegions, keys: Keys, start: int = 0) -> dict[int, int]:
    """Plays all keys, growing where there is no room; returns what a dictionary has then."""
    numbers = np.arange(start, start + keys.size)
    position = 0
    while True:
        position = play(regions.arrays, keys, numbers, position)
        if position == keys.size:
            break
        regions.grow(int(shard_of(keys[position], regions.arrays.num_shards)))
    expected: dict[int, int] = {}
    for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
        if key in expected:
            del expected[key]
        else:
            expected[key] = number
    return expected


def check(regions: RowRegions, expected: dict[int, int]) -> None:
    """Every key is found with what it was given, and nothing else stands in index, rows or words."""
    arrays = regions.arrays
    keys = np.array(list(expected), np.uint64)
    numbers = np.array(list(expected.values()), np.int64)
    rows = all_rows(arrays, keys)

    assert rows.size == 0 or rows.min() >= 0
    np.testing.assert_array_equal(arrays.keys[rows, 0], keys)
    weights = arrays.slab[rows, KEY_COLUMNS : KEY_COLUMNS + 3]
    np.testing.assert_array_equal(weights, np.repeat(numbers[:, None], 3, axis=1))
    words = rows + (arrays.change_rows - arrays.region_rows) * (rows // arrays.region_rows)
    np.testing.assert_array_equal(arrays.change_words[words, 0], numbers)
    assert int(arrays.num_rows.sum()) == keys.size
    for shard in range(arrays.num_shards):
        start, stop = regions.rows_of(shard).start, regions.rows_of(shard).stop
        assert np.sort(rows[(rows >= start) & (rows < stop)]).tolist() == list(range(start, stop))
        slots = arrays.slots[arrays.slot_starts[shard] :][: arrays.num_slots[shard]]
        assert np.count_nonzero(slots) == stop - start
        assert not arrays.slab[stop : stop + 8].any()
        first_word = shard * arrays.change_rows + stop - start
        assert not arrays.change_words[first_word : first_word + 8].any()


@pytest.mark.parametrize("seed", range(5))
def test_inserted_and_removed_rows_are_those_of_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    regions = regions_of(num_shards=4)
    universe = rng.integers(0, 2**64, 200, np.uint64)

    expected = toggle(regions, rng.choice(universe, 20_000))

    check(regions, expected)


@pytest.mark.slow
def test_millions_of_rows_come_and_go() -> None:
    rng = np.random.default_rng(7)
    regions = regions_of(num_shards=8)
    universe = rng.integers(0, 2**64, 100_000, np.uint64)

    expected = toggle(regions, rng.choice(universe, 5_000_000))

    assert len(expected) > 40_000
    check(regions, expected)


@pytest.mark.parametrize("seed", range(20))
def test_probe_sequences_that_pass_the_end_of_the_index_close_up(seed: int) -> None:
    """All keys begin at one of the last slots, or at the first."""
    rng = np.random.default_rng(seed)
    regions = regions_of(num_shards=1)
    starts = rng.choice([0, 1, INITIAL_SLOTS - 3, INITIAL_SLOTS - 2, INITIAL_SLOTS - 1], MOST_ROWS)
    hashes = [(i << 32) | int(start) for i, start in enumerate(starts)]
    universe = np.array([unmix64(hashed) for hashed in hashes], np.uint64)

    expected = toggle(regions, rng.choice(universe, 2_000))

    assert regions.arrays.num_slots[0] == INITIAL_SLOTS
    check(regions, expected)


def test_keys_with_one_tag_are_told_apart() -> None:
    """High 32 bits of the hash are the tag, low ones the slot: here both agree but for a few."""
    regions = regions_of(num_shards=1)
    universe = np.array([unmix64((9 << 32) | (i << 6)) for i in range(MOST_ROWS)], np.uint64)

    expected = toggle(regions, np.random.default_rng(3).choice(universe, 5_000))

    check(regions, expected)
