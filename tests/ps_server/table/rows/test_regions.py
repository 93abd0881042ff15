"""Regions that grow and shrink, and kernels that remove rows."""

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.memory.hash_index import (
    INITIAL_SLOTS,
    KEY_COLUMNS,
    MAX_LOAD_PERCENT,
    RowLayout,
    TableArrays,
    find_row,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.rows import regions
from ctr_ps.ps_server.table.rows.regions import SLOT_BYTES, RowRegions, remove_row
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.reference.partition import unmix64
from tests.support.address_space import gives_huge_pages_on_request, map_some

DIM = 2
NUM_SHARDS = 64


def new_table(num_shards: int = NUM_SHARDS) -> SparseTable:
    return SparseTable(
        TableSpec(
            name="t",
            dim=DIM,
            initializer=InitializerSpec(scale=0.0),
            optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
            num_shards=num_shards,
        )
    )


def push(table: SparseTable, keys: Keys) -> None:
    table.push(SparseGrad(keys, np.ones((keys.size, DIM), np.float32), 1))


def random_keys(count: int) -> Keys:
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64)


def keys_of_shards(counts: Sequence[int]) -> list[Keys]:
    keys = random_keys(3 * len(counts) * max(counts))
    shards = np.array([shard_of(key, len(counts)) for key in keys])
    return [keys[shards == i][:count] for i, count in enumerate(counts)]


def huge_pages_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    pytest.skip("this system does not tell of huge pages")


def test_shards_grow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, each of 64 shards would stop a push and take all locks at each of its five doublings."""
    grown = 0
    grow = RowRegions.grow

    def counted(self: RowRegions, shard: int) -> bool:
        nonlocal grown
        grown += 1
        return grow(self, shard)

    monkeypatch.setattr(RowRegions, "grow", counted)
    table, keys = new_table(), random_keys(60_000)

    for start in range(0, keys.size, 1000):
        push(table, keys[start : start + 1000])

    doublings = np.log2(table.status.index_slots / new_table().status.index_slots)
    assert doublings > 4
    assert grown < 5 * doublings
    assert (table.pull(keys, Missing.ZEROS) == -1.0).all()


def test_shards_begin_in_pages_with_different_lower_bits() -> None:
    """Or a processor has few places for the translations of their addresses."""
    table = new_table()
    arrays = table._arrays
    rows = np.arange(64) * arrays.region_rows * arrays.slab.shape[1] * 4

    for starts in (rows, arrays.slot_starts * SLOT_BYTES):
        assert len(set((starts // 2**12 % 128).tolist())) > 48


def test_index_is_never_larger_than_is_said_of_new_rows() -> None:
    """By which a server knows its memory before a push; an empty index apart."""
    table, keys = new_table(), random_keys(60_000)
    empty = table.status.size_bytes

    for start in range(0, keys.size, 500):
        push(table, keys[start : start + 500])

        assert table.status.size_bytes <= empty + table.new_row_bytes * table.status.rows


def test_shard_that_is_not_nearly_full_does_not_grow_with_another() -> None:
    """Or its index would be larger than is said of new rows."""
    table, (small, large) = new_table(num_shards=2), keys_of_shards([49, 2_600])
    empty = table.status.size_bytes
    push(table, large)

    push(table, small)

    assert table.status.size_bytes <= empty + table.new_row_bytes * table.status.rows


def test_small_shard_grows_beside_a_large_one_where_regions_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their regions are as long as the largest index needs."""
    monkeypatch.setattr("ctr_ps.ps_server.table.memory.arena.mmap.mmap", map_some(repeat(False)))
    table, (small, large, *_) = new_table(num_shards=4), keys_of_shards([49, 6_000, 0, 0])
    push(table, large)

    push(table, small)

    assert (table.pull(np.concatenate([small, large]), Missing.ZEROS) == -1.0).all()


@pytest.mark.parametrize("from_bytes", [2**20, 2**30])
def test_rows_of_a_large_shard_are_in_huge_pages(
    from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "HUGE_PAGES_FROM_BYTES", from_bytes)
    if not gives_huge_pages_on_request():
        pytest.skip("this system gives huge pages to nobody or to everybody")
    table, keys = new_table(num_shards=2), random_keys(2_000_000)
    before = huge_pages_bytes()

    for start in range(0, keys.size, 10_000):
        push(table, keys[start : start + 10_000])

    index, rows = SLOT_BYTES * table.status.index_slots, 16 * table.status.rows
    huge = huge_pages_bytes() - before
    assert huge > 0.8 * (index + (rows if from_bytes == 2**20 else 0))
    assert huge < 1.1 * (index + (rows if from_bytes == 2**20 else 0)) + 8 * 2**20


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
    """Removes a key that is there, else inserts it with its number as weights and change byte.

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
            position = row + shard * (table.change_rows - table.region_rows)
            table.change_bytes[position, 0] = np.uint8(numbers[i])
        else:
            return i
    return keys.size


@kernel
def all_rows(table: TableArrays, keys: Keys) -> NDArray[np.int64]:
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
    """Every key is found with what it was given, and nothing else stands in index, rows or change bytes."""
    arrays = regions.arrays
    keys = np.array(list(expected), np.uint64)
    numbers = np.array(list(expected.values()), np.int64)
    rows = all_rows(arrays, keys)

    assert rows.size == 0 or rows.min() >= 0
    np.testing.assert_array_equal(arrays.keys[rows, 0], keys)
    weights = arrays.slab[rows, KEY_COLUMNS : KEY_COLUMNS + 3]
    np.testing.assert_array_equal(weights, np.repeat(numbers[:, None], 3, axis=1))
    positions = rows + (arrays.change_rows - arrays.region_rows) * (rows // arrays.region_rows)
    np.testing.assert_array_equal(arrays.change_bytes[positions, 0], numbers % 256)
    assert int(arrays.num_rows.sum()) == keys.size
    for shard in range(arrays.num_shards):
        start, stop = regions.rows_of(shard).start, regions.rows_of(shard).stop
        assert np.sort(rows[(rows >= start) & (rows < stop)]).tolist() == list(range(start, stop))
        slots = arrays.slots[arrays.slot_starts[shard] :][: arrays.num_slots[shard]]
        assert np.count_nonzero(slots) == stop - start
        assert not arrays.slab[stop : stop + 8].any()
        first_byte = shard * arrays.change_rows + stop - start
        assert not arrays.change_bytes[first_byte : first_byte + 8].any()


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
