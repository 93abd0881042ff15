"""Kernels that remove rows: `remove_row` one in constant time, `drop_rows` many in one pass over a shard.

    remove_row:  | a | b | X | d | e |   ->   | a | b | e | d |      the last row moves into the hole
    drop_rows:   | a | b | X | d | e |   ->   | a | b | d | e |      rows move up; the index is rebuilt after

In the index, `remove_row` deletes without tombstones (Knuth, The Art of Computer Programming 3, section 6.4,
algorithm R): lookups stay as short as if the key had never been inserted.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.changes.dirty_rows import mark_dirty_before_move, move_dirty_bit
from ctr_ps.ps_server.table.memory.hash_index import TableArrays, first_slot, next_slot, row_of_slot
from ctr_ps.ps_server.table.memory.intrinsics import Int


@kernel
def _slot_of_row(table: TableArrays, shard: Int, row: Int) -> np.int64:
    slot = first_slot(table, shard, mix64(table.keys[row, 0]))
    while row_of_slot(table, shard, table.slots[slot]) != row:
        slot = next_slot(table, shard, slot)
    return slot


@kernel
def _clear_slot(table: TableArrays, shard: Int, slot: Int) -> None:
    """Empties a slot, and moves up the entries after it whose probe sequence passes it."""
    mask = table.num_slots[shard] - 1
    hole, probed = slot, slot
    while True:
        probed = next_slot(table, shard, probed)
        entry = table.slots[probed]
        if entry == np.uint64(0):
            table.slots[hole] = np.uint64(0)
            return
        key = table.keys[row_of_slot(table, shard, entry), 0]
        distance = (probed - first_slot(table, shard, mix64(key))) & mask
        if distance >= (probed - hole) & mask:
            table.slots[hole] = entry
            hole = probed


# Copied by loops: assigning a row to another compiles its error of shapes, too, for 3 s.


@kernel
def _copy_row(table: TableArrays, source: Int, target: Int) -> None:
    for column in range(table.slab.shape[1]):
        table.slab[target, column] = table.slab[source, column]


@kernel
def _copy_words(table: TableArrays, source: Int, target: Int) -> None:
    for word in range(table.change_words.shape[1]):
        table.change_words[target, word] = table.change_words[source, word]


@kernel
def remove_row(table: TableArrays, shard: Int, row: Int) -> None:
    """Removes a row, a position in `table.slab`; the shard's last row takes its place.

    Its change words and dirty bit move with it. The last position is zeroed, as is all memory without a row.
    """
    _clear_slot(table, shard, _slot_of_row(table, shard, row))
    row_in_shard = row - shard * table.region_rows
    last_in_shard = table.num_rows[shard] - 1
    last = shard * table.region_rows + last_in_shard
    words = shard * table.change_rows
    mark_dirty_before_move(table, shard, row)
    if row != last:
        mark_dirty_before_move(table, shard, last)
        move_dirty_bit(table, shard, last, row)
        slot = _slot_of_row(table, shard, last)
        tag = table.slots[slot] & np.uint64(0xFFFFFFFF00000000)
        table.slots[slot] = tag | np.uint64(row_in_shard + 1)
        _copy_row(table, last, row)
        _copy_words(table, words + last_in_shard, words + row_in_shard)
    table.slab[last] = np.float32(0.0)
    for word in range(table.change_words.shape[1]):  # without subscribers there are no rows of them
        table.change_words[words + last_in_shard, word] = np.uint64(0)
    table.num_rows[shard] = last_in_shard


@kernel
def drop_rows(table: TableArrays, shard: Int, to_remove: NDArray[np.uint8]) -> int:
    """Removes rows from a shard's region, but not from its index, which must be rebuilt.

    The other rows move up in order, with their change words and dirty bits. `to_remove` uint8[rows of the
    shard] has 1 for each row to remove. Returns the number of rows left.
    """
    kept = 0
    for row_in_shard in range(table.num_rows[shard]):
        row = shard * table.region_rows + row_in_shard
        if to_remove[row_in_shard] or kept < row_in_shard:
            mark_dirty_before_move(table, shard, row)
        if to_remove[row_in_shard]:
            continue
        if kept < row_in_shard:
            move_dirty_bit(table, shard, row, shard * table.region_rows + kept)
            _copy_row(table, row, shard * table.region_rows + kept)
            words = shard * table.change_rows
            _copy_words(table, words + row_in_shard, words + kept)
        kept += 1
    table.num_rows[shard] = kept
    return kept
