"""Rows and hash index of a table: how a key becomes a row. Open addressing with linear probing.

    mix64(key) -> shard (shard_of_hash) -> slot (first_slot, next_slot) -> row (row_of_slot)

Each shard has an array of uint64 slots whose number is a power of two:

    slot = | high 32 bits of mix64(key): the tag | row + 1: 32 bits |        0 = empty
    row  = | key: 8 bytes | weights: dim x float32 | state: state_width x float32 | statistics | base | pad |
                          | or dim x bfloat16, pad |

The key is in the row, so a slot takes 8 bytes, every uint64 is a valid key, and a lookup touches one slot and
one row (docs/decisions/0001). Tags of different keys agree once in 2^26 probes; then the key in the row
decides.

Statistics, 4 columns, are present if the table's spec has them (rows/statistics.py). Only rows of a replica
have a base, as wide as the weights (replica_table.py). A row has an even number of columns, so that keys stay
aligned.

Kernels look up a block of keys at a time (`find_block`): they prefetch all slots, then all rows, then read,
so that the cache misses of a block overlap.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.runtime.jit import inlined_kernel, kernel
from ctr_ps.protos.wire.encoding.arrays import BFloat16s, from_bfloat16
from ctr_ps.ps_server.table.memory.intrinsics import Int, borrow, prefetch

KEY_COLUMNS = 2
"""Width of the key, in float32 columns."""

STATISTICS_WIDTH = 4
"""Width of the statistics, in float32 columns."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Columns of a row, counted in float32."""

    dim: int
    state_width: int
    statistics_width: int = 0  # or STATISTICS_WIDTH
    has_base: bool = False
    is_bfloat16: bool = False

    @property
    def state(self) -> slice:
        """Columns of the optimizer state; the weights end before it."""
        start = KEY_COLUMNS + ((self.dim + 1) // 2 if self.is_bfloat16 else self.dim)
        return slice(start, start + self.state_width)

    @property
    def statistics(self) -> slice:
        """Columns of the statistics."""
        return slice(self.state.stop, self.state.stop + self.statistics_width)

    @property
    def stride(self) -> int:
        """Columns from one row to the next."""
        width: int = self.statistics.stop + self.has_base * self.dim
        return width + width % 2

    def weights_in(self, rows: Values) -> Values:
        """Returns the weights float32[N, D] of rows float32[N, stride]."""
        columns = rows[:, KEY_COLUMNS : self.state.start]
        if not self.is_bfloat16:
            return columns
        stored = np.ascontiguousarray(columns).view(np.uint16)[:, : self.dim]
        return from_bfloat16(stored.reshape(-1)).reshape(-1, self.dim)


BLOCK = 32
"""Keys in flight: enough to hide the latency of memory, few enough to stay in the first-level cache."""

MAX_LOAD_PERCENT = 75
"""Fuller than this, an index doubles. Probe sequences average 2.5 slots at this load, in one cache line."""

INITIAL_SLOTS = 64

BITS_PER_WORD = 64
"""Dirty bits in a word."""


def slots_for(rows: int) -> int:
    """Returns the fewest slots that an index of `rows` rows may have."""
    slots = INITIAL_SLOTS
    while 100 * rows > MAX_LOAD_PERCENT * slots:
        slots *= 2
    return slots


_LINE = 16  # float32 in a cache line


class SnapshotArrays(NamedTuple):
    """Dirty bits, and the old versions of rows kept for a snapshot, as kernels see them (changes.py)."""

    dirty: NDArray[np.uint64]  # uint64[num_shards * dirty_words], a bit for each row
    dirty_words: int  # words from one shard's dirty bits to the next
    # int64[num_shards], rows in the snapshot; 0 without a snapshot
    snapshot_rows: NDArray[np.int64]
    copied_rows: NDArray[np.int64]  # int64[num_shards], those already copied
    # uint64[num_shards * kept_rows, 1 + stride / 2], number in the shard and bytes of old rows
    kept: NDArray[np.uint64]
    kept_rows: int  # rows from one shard's part of `kept` to the next
    num_kept: NDArray[np.int64]  # int64[num_shards]


class TableArrays(NamedTuple):
    """A table as kernels see it: shard s has region s of the slab, and 2 s or 2 s + 1 of the index."""

    slots: NDArray[np.uint64]  # uint64[...], of all shards
    slot_starts: NDArray[np.int64]  # int64[num_shards], where a shard's slots begin
    num_slots: NDArray[np.int64]  # int64[num_shards], a power of two
    num_rows: NDArray[np.int64]  # int64[num_shards]
    max_rows: int  # most rows of a shard
    slab: NDArray[np.float32]  # float32[num_shards * region_rows, stride], rows of all shards
    # uint64[num_shards * region_rows, stride / 2], the same memory; column 0 is the key
    keys: NDArray[np.uint64]
    region_rows: int  # rows from one shard's region to the next
    # uint8[num_shards * change_rows, B], B = 0 without subscribers (changes.py)
    change_bytes: NDArray[np.uint8]
    change_rows: int  # rows from one shard's bytes to the next
    snapshot: SnapshotArrays  # dirty bits and old versions of rows
    statistics_column: int  # first column of a row's statistics; 0 without
    base_column: int  # first column of a row's base; 0 without
    state_column: int  # first column of a row's optimizer state
    is_bfloat16: bool  # whether weights are bfloat16
    bfloat16: BFloat16s  # uint16[num_shards * region_rows * 2 * stride], the slab's memory
    num_shards: int  # a power of two


@kernel
def shard_of_hash(table: TableArrays, hashed: np.uint64) -> np.int64:
    """Returns the shard of a key from its hash; as protos.placement.shard_of."""
    return np.int64(((hashed >> np.uint64(32)) * np.uint64(table.num_shards)) >> np.uint64(32))


@kernel
def first_slot(table: TableArrays, shard: Int, hashed: np.uint64) -> np.int64:
    """Returns the start of a key's probe sequence, a position in `table.slots`."""
    mask = np.uint64(table.num_slots[shard] - 1)
    return np.int64(table.slot_starts[shard] + np.int64(hashed & mask))


@kernel
def next_slot(table: TableArrays, shard: Int, slot: Int) -> np.int64:
    """Returns the position after `slot`, wrapping around at the end of the shard's index."""
    start = table.slot_starts[shard]
    return np.int64(start + ((slot + 1 - start) & (table.num_slots[shard] - 1)))


@kernel
def row_of_slot(table: TableArrays, shard: Int, entry: np.uint64) -> np.int64:
    """Returns the row, a position in `table.slab`, that an occupied slot points to."""
    return np.int64(shard * table.region_rows + np.int64(entry & np.uint64(0xFFFFFFFF)) - 1)


@inlined_kernel
def bfloat16_of(table: TableArrays, row: Int, dim: int) -> BFloat16s:
    """Returns a row's bfloat16 weights, uint16[D]; see `borrow`."""
    return borrow(table.bfloat16, 2 * (row * table.slab.shape[1] + KEY_COLUMNS), dim)


@inlined_kernel
def find_row(table: TableArrays, shard: Int, hashed: np.uint64, key: np.uint64) -> np.int64:
    """Returns the row of `key`, or -1."""
    slot = first_slot(table, shard, hashed)
    while True:
        entry = table.slots[slot]
        if entry == np.uint64(0):
            return np.int64(-1)
        if (entry ^ hashed) >> np.uint64(32) == np.uint64(0):
            row = row_of_slot(table, shard, entry)
            if table.keys[row, 0] == key:
                return row
        slot = next_slot(table, shard, slot)


@kernel
def _likely_row(table: TableArrays, shard: Int, hashed: np.uint64) -> np.int64:
    """Returns the first row whose tag matches, or -1, without touching the slab."""
    slot = first_slot(table, shard, hashed)
    while True:
        entry = table.slots[slot]
        if entry == np.uint64(0):
            return np.int64(-1)
        if (entry ^ hashed) >> np.uint64(32) == np.uint64(0):
            return row_of_slot(table, shard, entry)
        slot = next_slot(table, shard, slot)


@kernel
def find_block(
    table: TableArrays,
    keys: Keys,
    start: int,
    stop: int,
    hashes: NDArray[np.uint64],
    rows: NDArray[np.int64],
) -> None:
    """Finds and prefetches the rows of `keys[start:stop]`, at most `BLOCK` of them.

    Overwrites uint64[BLOCK] `hashes`, and `rows` int64[BLOCK] with rows, or -1 for a key without one.
    """
    stride = table.slab.shape[1]
    slab = table.slab.reshape(-1)
    for i in range(stop - start):
        hashed = mix64(keys[start + i])
        hashes[i] = hashed
        prefetch(table.slots, first_slot(table, shard_of_hash(table, hashed), hashed))
    for i in range(stop - start):
        row = _likely_row(table, shard_of_hash(table, hashes[i]), hashes[i])
        rows[i] = row
        if row >= 0:
            for column in range(0, stride, _LINE):
                prefetch(slab, row * stride + column)
            prefetch(slab, row * stride + stride - 1)
    for i in range(stop - start):
        key = keys[start + i]
        if rows[i] >= 0 and table.keys[rows[i], 0] != key:
            rows[i] = find_row(table, shard_of_hash(table, hashes[i]), hashes[i], key)


@inlined_kernel
def has_room(table: TableArrays, shard: Int) -> bool:
    """Whether the shard's index, regions and limit leave room for one more row."""
    rows = table.num_rows[shard] + 1
    fits_index = rows * 100 <= table.num_slots[shard] * MAX_LOAD_PERCENT
    fits_bytes = rows <= table.change_rows or table.change_bytes.shape[1] == 0
    fits_dirty_bits = rows <= BITS_PER_WORD * table.snapshot.dirty_words
    fits_region = rows <= min(table.region_rows, table.max_rows)
    return bool(fits_index and fits_bytes and fits_dirty_bits and fits_region)


@inlined_kernel
def insert_row(table: TableArrays, shard: Int, hashed: np.uint64, key: np.uint64) -> np.int64:
    """Inserts `key`, which has no row, and returns its new row, to be filled; `has_room` must hold."""
    row_in_shard = table.num_rows[shard]
    table.num_rows[shard] = row_in_shard + 1
    row = shard * table.region_rows + row_in_shard
    table.keys[row, 0] = key
    slot = first_slot(table, shard, hashed)
    while table.slots[slot] != np.uint64(0):
        slot = next_slot(table, shard, slot)
    tag = hashed & np.uint64(0xFFFFFFFF00000000)
    table.slots[slot] = tag | np.uint64(row_in_shard + 1)
    return np.int64(row)


@kernel
def rebuild_index(table: TableArrays, shard: Int) -> None:
    """Fills the shard's empty index from the keys in its rows."""
    first = shard * table.region_rows
    for row_in_shard in range(table.num_rows[shard]):
        # Keys are read in order, so the processor prefetches them by itself; slots are not.
        ahead = row_in_shard + BLOCK
        if ahead < table.num_rows[shard]:
            prefetch(table.slots, first_slot(table, shard, mix64(table.keys[first + ahead, 0])))
        hashed = mix64(table.keys[first + row_in_shard, 0])
        slot = first_slot(table, shard, hashed)
        while table.slots[slot] != np.uint64(0):
            slot = next_slot(table, shard, slot)
        tag = hashed & np.uint64(0xFFFFFFFF00000000)
        table.slots[slot] = tag | np.uint64(row_in_shard + 1)
