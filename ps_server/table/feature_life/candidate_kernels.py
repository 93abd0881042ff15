"""Kernels that count a push's keys without a row, and give rows to those that are admitted.

Each key is either counted completely or not at all: a key whose shard has no room is not counted, so a push
that is resumed after making room counts no key twice. A key with a row is no candidate. One call serves all
shards of a push.
"""

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.changes.dirty_rows import mark_dirty
from ctr_ps.ps_server.table.feature_life.admission import AdmissionRule, is_admitted
from ctr_ps.ps_server.table.feature_life.bloom_filter import FilterArrays, estimate, raise_to
from ctr_ps.ps_server.table.memory.hash_index import (
    BLOCK,
    TableArrays,
    find_block,
    find_row,
    first_slot,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int, prefetch
from ctr_ps.ps_server.table.memory.layout import STATISTICS_WIDTH
from ctr_ps.ps_server.table.rows.initializers import Initializer
from ctr_ps.ps_server.table.rows.kernels import Push, make_row
from ctr_ps.ps_server.table.rows.removal import remove_row
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, count_push


@kernel
def _new_row(
    table: TableArrays,
    initializer: Initializer,
    initial_state: Values,
    push: Push,
    position: Int,
    hashed: np.uint64,
) -> np.int64:
    """Inserts a key's row, and returns the position of its statistics in the flat slab."""
    shard, dim = shard_of_hash(table, hashed), push.grads.shape[1]
    row = make_row(table, initializer, initial_state, dim, shard, hashed, push.keys[position])
    return np.int64(row * table.slab.shape[1] + table.statistics_column)


@kernel
def _count_exactly(
    table: TableArrays,
    initializer: Initializer,
    initial_state: Values,
    candidates: TableArrays,
    rule: AdmissionRule,
    push: Push,
    position: Int,
    hashed: np.uint64,
) -> bool:
    """Counts one key without a row, or inserts its row; False if there is no room: then changes nothing."""
    key, shard = push.keys[position], shard_of_hash(table, hashed)
    counted, width = candidates.slab.reshape(-1), candidates.slab.shape[1]
    occurrences, clicks = push.counts[position, 0], push.counts[position, 1]
    show, click = np.float32(occurrences), np.float32(clicks)
    candidate = find_row(candidates, shard, hashed, key)
    first = candidate * width + candidates.statistics_column
    if candidate >= 0:
        show, click = counted[first + SHOW] + show, counted[first + CLICK] + click
    if is_admitted(rule, key, show, click):
        if not has_room(table, shard):
            return False
        new = _new_row(table, initializer, initial_state, push, position, hashed)
        if candidate >= 0:
            slab = table.slab.reshape(-1)
            for column in range(STATISTICS_WIDTH):
                slab[new + column] = counted[first + column]
            remove_row(candidates, shard, candidate)
        return True
    if candidate < 0:
        if not has_room(candidates, shard):
            return False
        candidate = insert_row(candidates, shard, hashed, key)
        first = candidate * width + candidates.statistics_column
    mark_dirty(candidates, shard, candidate)
    count_push(counted, counted.view(np.uint32), first, occurrences, clicks, push.now)
    return True


@kernel
def admit_counted(
    table: TableArrays,
    initializer: Initializer,
    initial_state: Values,
    candidates: TableArrays,
    rule: AdmissionRule,
    push: Push,
    start: int,
) -> int:
    """Counts a push's keys without a row from key `start` on, and inserts rows for admitted ones.

    A new row takes over its candidate's statistics from before this push; `apply_rows` adds the push's own.
    `candidates` are rows of dim 0 with statistics, in the table's shards.

    Returns:
        N when all are counted; else the position of a key whose shard has no room in `table` or in
        `candidates`. All keys before it are counted, none after.
    """
    hashes, rows = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    while start < push.keys.size:
        stop = min(start + BLOCK, push.keys.size)
        find_block(table, push.keys, start, stop, hashes, rows)
        for i in range(stop - start):
            if rows[i] < 0:
                shard = shard_of_hash(table, hashes[i])
                prefetch(candidates.slots, first_slot(candidates, shard, hashes[i]))
        for i in range(stop - start):
            if rows[i] < 0 and not _has_row(table, push.keys[start + i], hashes[i]):
                position, hashed = start + i, hashes[i]
                if not _count_exactly(
                    table, initializer, initial_state, candidates, rule, push, position, hashed
                ):
                    return position
        start = stop
    return start


@kernel
def _has_row(table: TableArrays, key: np.uint64, hashed: np.uint64) -> bool:
    """Whether a key has a row by now: a key may be in a block twice."""
    return bool(find_row(table, shard_of_hash(table, hashed), hashed, key) >= 0)


@kernel
def _count_by_filter(
    table: TableArrays,
    initializer: Initializer,
    initial_state: Values,
    filter_: FilterArrays,
    rule: AdmissionRule,
    push: Push,
    position: Int,
    hashed: np.uint64,
) -> bool:
    """Same as `_count_exactly`, with the filter's estimate."""
    shard = shard_of_hash(table, hashed)
    before = estimate(filter_, shard, hashed)
    count = min(before + np.int64(push.counts[position, 0]), np.int64(filter_.limit))
    if is_admitted(rule, push.keys[position], np.float32(count), np.float32(0.0)):
        if not has_room(table, shard):
            return False
        new = _new_row(table, initializer, initial_state, push, position, hashed)
        table.slab.reshape(-1)[new + SHOW] = np.float32(before)
    raise_to(filter_, shard, hashed, count)
    return True


@kernel
def admit_estimated(
    table: TableArrays,
    initializer: Initializer,
    initial_state: Values,
    filter_: FilterArrays,
    rule: AdmissionRule,
    push: Push,
    start: int,
) -> int:
    """Same as `admit_counted`, with the filter's estimates.

    A new row starts with the estimate before this push as its shows, and no clicks. Its counters are kept.
    """
    hashes, rows = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    while start < push.keys.size:
        stop = min(start + BLOCK, push.keys.size)
        find_block(table, push.keys, start, stop, hashes, rows)
        for i in range(stop - start):
            if rows[i] < 0 and not _has_row(table, push.keys[start + i], hashes[i]):
                position, hashed = start + i, hashes[i]
                if not _count_by_filter(
                    table, initializer, initial_state, filter_, rule, push, position, hashed
                ):
                    return position
        start = stop
    return start
