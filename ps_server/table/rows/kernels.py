"""Kernels that read rows and apply gradients to them. One call serves all shards of a request."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Counts, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import inlined_kernel, kernel
from ctr_ps.ps_server.optimizers.row_update import decay_row, update_row
from ctr_ps.ps_server.table.changes import (
    BYTE_BITS,
    EVERY_SUBSCRIBER,
    NOBODY,
    mark_dirty,
    prefetch_dirty_bit,
)
from ctr_ps.ps_server.table.memory.bfloat16 import load_bfloat16, store_bfloat16
from ctr_ps.ps_server.table.memory.hash_index import (
    BLOCK,
    KEY_COLUMNS,
    TableArrays,
    bfloat16_of,
    find_block,
    find_row,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int, borrow, prefetch
from ctr_ps.ps_server.table.rows.initializers import (
    Initializer,
    initialize_bfloat16,
    initialize_row,
)
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, Coefficients, count_push, score_of


class Push(NamedTuple):
    """A push to one table as kernels see it; all arrays are read-only."""

    keys: Keys  # uint64[N]
    grads: Values  # float32[N, D], sums over examples
    scale: np.float32  # one over the number of examples
    decay: np.float32  # share of a row's weights that is removed before the update
    # uint32[N, 2], occurrences and clicks; uint32[0, 2] for a table without statistics
    counts: Counts
    admitted: NDArray[np.uint8]  # uint8[N], whether a key without a row gets one; uint8[0]: all do
    now: np.uint32  # seconds since 1970
    draw: np.uint64  # of the rounding of bfloat16 weights
    # the subscriber that sent it, for which the rows do not count as changed; or NOBODY
    source: int


class NewRow(NamedTuple):
    """Initial values of a row as kernels see them."""

    initializer: Initializer  # of the weights
    state: Values  # float32[state_width], that of the optimizer


@inlined_kernel
def _load_weights(table: TableArrays, row: Int, out: Values) -> None:
    """Overwrites `out` float32[D] with the weights of a row."""
    if table.is_bfloat16:
        load_bfloat16(bfloat16_of(table, row, out.size), out)
    else:
        for j in range(out.size):
            out[j] = table.slab[row, KEY_COLUMNS + j]


@kernel
def gather_rows(
    table: TableArrays,
    initializer: Initializer,
    keys: Keys,
    reads_initial: bool,
    default: np.float32,
    out: Values,
) -> None:
    """Overwrites `out` float32[N, D] with the embeddings of `keys` uint64[N].

    A key without a row reads its initial value if `reads_initial`, else `default` in every column.
    """
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    dim, flat_out = out.shape[1], out.reshape(-1)
    for start in range(0, keys.size, BLOCK):
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(stop - start):
            row = rows[i]
            if row >= 0:
                _load_weights(table, row, borrow(flat_out, (start + i) * dim, dim))
            elif reads_initial:
                initialize_row(initializer, keys[start + i], out[start + i])
            else:
                for j in range(dim):
                    out[start + i, j] = default


@kernel
def gather_states(
    table: TableArrays,
    new_row: NewRow,
    keys: Keys,
    weights: Values,
    state: Values,
) -> None:
    """Overwrites `weights` float32[N, D] and `state` float32[N, K] with rows of `keys`, or new ones."""
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    dim, state_width = weights.shape[1], state.shape[1]
    flat_weights = weights.reshape(-1)
    for start in range(0, keys.size, BLOCK):
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(stop - start):
            row = rows[i]
            if row < 0:
                initialize_row(new_row.initializer, keys[start + i], weights[start + i])
                for j in range(state_width):
                    state[start + i, j] = new_row.state[j]
                continue
            _load_weights(table, row, borrow(flat_weights, (start + i) * dim, dim))
            for j in range(state_width):
                state[start + i, j] = table.slab[row, table.state_column + j]


@kernel
def score_rows(table: TableArrays, coefficients: Coefficients, keys: Keys, out: Values) -> None:
    """Overwrites `out` float32[N] with the scores of `keys` uint64[N]; 0 for a key without a row."""
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    column = table.statistics_column
    for start in range(0, keys.size, BLOCK):
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(stop - start):
            row = rows[i]
            out[start + i] = np.float32(0.0)
            if row >= 0:
                show, click = table.slab[row, column + SHOW], table.slab[row, column + CLICK]
                out[start + i] = score_of(coefficients, show, click)


@kernel
def find_new_row(table: TableArrays, keys: Keys) -> int:
    """Returns the position of the first of `keys` uint64[N] that needs a new row; N if none does.

    A key in a shard at its limit of rows needs none: a push evicts others for it.
    """
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    for start in range(0, keys.size, BLOCK):
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(stop - start):
            if rows[i] < 0 and table.num_rows[shard_of_hash(table, hashes[i])] < table.max_rows:
                return start + i
    return int(keys.size)


@kernel
def _first_byte(table: TableArrays, shard: Int, row: Int) -> np.int64:
    row_of_bytes = row + shard * (table.change_rows - table.region_rows)
    return np.int64(row_of_bytes * table.change_bytes.shape[1])


@inlined_kernel
def _prefetch_change_bits(
    table: TableArrays, hashes: NDArray[np.uint64], rows: NDArray[np.int64], size: Int
) -> None:
    """Prefetches change bytes and dirty bits; without, pushes to 5 M rows took 1.3 times as long."""
    change_bytes, num_bytes = table.change_bytes.reshape(-1), table.change_bytes.shape[1]
    for i in range(size):
        if rows[i] >= 0:
            shard = shard_of_hash(table, hashes[i])
            prefetch_dirty_bit(table, shard, rows[i])
            if num_bytes:
                prefetch(change_bytes, _first_byte(table, shard, rows[i]))


@kernel
def mark_changed(table: TableArrays, shard: Int, row: Int) -> None:
    """Marks a row, a position in `table.slab`, as changed for all subscribers, and for a move."""
    change_bytes, num_bytes = table.change_bytes.reshape(-1), table.change_bytes.shape[1]
    _mark_for_subscribers(change_bytes, _first_byte(table, shard, row), num_bytes, NOBODY)


@kernel
def _mark_for_subscribers(
    change_bytes: NDArray[np.uint8], first: Int, num_bytes: int, source: int
) -> None:
    for byte in range(num_bytes):
        subscribers = EVERY_SUBSCRIBER
        if byte == source // BYTE_BITS:
            subscribers ^= np.uint8(1 << (source % BYTE_BITS))
        change_bytes[first + byte] |= subscribers


@inlined_kernel
def make_row(
    table: TableArrays, new_row: NewRow, dim: int, shard: Int, hashed: np.uint64, key: np.uint64
) -> np.int64:
    """Inserts a row with initial values for `key`, which has none, and returns it; `has_room` must hold."""
    row = insert_row(table, shard, hashed, key)
    slab, first = table.slab.reshape(-1), row * table.slab.shape[1]
    if table.is_bfloat16:
        initialize_bfloat16(new_row.initializer, key, bfloat16_of(table, row, dim))
    else:
        initialize_row(new_row.initializer, key, borrow(slab, first + KEY_COLUMNS, dim))
    # Loops, not slices: assigning an array compiles its error of shapes, too, for 3 s.
    for j in range(new_row.state.size):
        slab[first + table.state_column + j] = new_row.state[j]
    # Statistics are 0 already: memory after the last row is zeroed.
    if table.base_column:
        for j in range(dim):
            slab[first + table.base_column + j] = slab[first + KEY_COLUMNS + j]
    return row


@kernel
def apply_rows(table: TableArrays, new_row: NewRow, hyper: Any, push: Push, start: int) -> int:
    """Applies a push from key `start` on, creating missing rows for admitted keys.

    The type of `hyper` selects the optimizer. Returns N, or the position of a key whose shard has no room for
    a new row, to resume from after making room: all keys before it are applied, none after.
    """
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    slab, flat_grads = table.slab.reshape(-1), push.grads.reshape(-1)
    bits = slab.view(np.uint32)
    change_bytes, num_bytes = table.change_bytes.reshape(-1), table.change_bytes.shape[1]
    dim, state_width = push.grads.shape[1], new_row.state.size
    unpacked = np.empty(dim, np.float32)  # a row's weights, if they are bfloat16
    while start < push.keys.size:
        stop = min(start + BLOCK, push.keys.size)
        find_block(table, push.keys, start, stop, hashes, rows)
        _prefetch_change_bits(table, hashes, rows, stop - start)
        for i in range(stop - start):
            row = rows[i]
            key = push.keys[start + i]
            shard = shard_of_hash(table, hashes[i])
            if row < 0:
                row = find_row(table, shard, hashes[i], key)  # a key twice in this block
            if row < 0:
                if push.admitted.size and not push.admitted[start + i]:
                    continue
                if not has_room(table, shard):
                    return start + i
                row = make_row(table, new_row, dim, shard, hashes[i], key)
            mark_dirty(table, shard, row)
            first = row * table.slab.shape[1]
            state = borrow(slab, first + table.state_column, state_width)
            grad = borrow(flat_grads, (start + i) * dim, dim)
            if table.is_bfloat16:
                stored = bfloat16_of(table, row, dim)
                load_bfloat16(stored, unpacked)
                decay_row(unpacked, push.decay)
                update_row(hyper, unpacked, state, grad, push.scale)
                store_bfloat16(unpacked, stored, key, push.draw)
            else:
                weights = borrow(slab, first + KEY_COLUMNS, dim)
                decay_row(weights, push.decay)
                update_row(hyper, weights, state, grad, push.scale)
            if table.statistics_column:
                occurrences, clicks = push.counts[start + i, 0], push.counts[start + i, 1]
                count_push(
                    slab, bits, first + table.statistics_column, occurrences, clicks, push.now
                )
            _mark_for_subscribers(
                change_bytes, _first_byte(table, shard, row), num_bytes, push.source
            )
        start = stop
    return start


@kernel
def write_rows(
    table: TableArrays,
    keys: Keys,
    weights: Values,
    state: Values,
    statistics: Values,
    draw: np.uint64,
    start: int,
) -> int:
    """Writes whole rows, as from a checkpoint, rounded by `draw`; returns the same as `apply_rows`."""
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    first_statistics = table.state_column + state.shape[1]
    dim, flat_weights = weights.shape[1], weights.reshape(-1)
    change_bytes, num_bytes = table.change_bytes.reshape(-1), table.change_bytes.shape[1]
    while start < keys.size:
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(start, stop):
            row, hashed = rows[i - start], hashes[i - start]
            shard = shard_of_hash(table, hashed)
            if row < 0:
                row = find_row(table, shard, hashed, keys[i])  # a key twice in this block
            if row < 0:
                if not has_room(table, shard):
                    return i
                row = insert_row(table, shard, hashed, keys[i])
            mark_dirty(table, shard, row)
            if table.is_bfloat16:
                store_bfloat16(
                    borrow(flat_weights, i * dim, dim), bfloat16_of(table, row, dim), keys[i], draw
                )
            else:
                for j in range(dim):
                    table.slab[row, KEY_COLUMNS + j] = weights[i, j]
            for j in range(state.shape[1]):
                table.slab[row, table.state_column + j] = state[i, j]
            for j in range(statistics.shape[1]):
                table.slab[row, first_statistics + j] = statistics[i, j]
            _mark_for_subscribers(change_bytes, _first_byte(table, shard, row), num_bytes, NOBODY)
        start = stop
    return start


@kernel
def take_changed_rows(
    table: TableArrays, shard: Int, start: int, stop: int, subscriber: int, rows: NDArray[np.int64]
) -> tuple[int, int]:
    """Finds a shard's rows that changed for a subscriber, and clears their bits.

    Scans rows from `start` to `stop`, which may exceed the shard's rows: bytes are zero there. Overwrites
    `rows` int64[N], positions in `table.slab`, from the front. Returns the number of rows found, at most N,
    and the row to resume from.
    """
    count = 0
    byte, bit = subscriber // BYTE_BITS, np.uint8(1 << (subscriber % BYTE_BITS))
    for row_in_shard in range(start, stop):
        position = shard * table.change_rows + row_in_shard
        if table.change_bytes[position, byte] & bit:
            if count == rows.size:
                return count, row_in_shard
            table.change_bytes[position, byte] ^= bit
            rows[count] = shard * table.region_rows + row_in_shard
            count += 1
    return count, stop
