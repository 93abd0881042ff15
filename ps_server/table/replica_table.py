"""A table that a worker trains apart from the servers, and that knows what they had.

    row = | key | weights | optimizer state | base: dim x float32 | padding |

`base` is the servers' row, as far as this worker knows. Deltas are taken of the rows that were trained since
they were last taken; rows of the servers are merged in.
"""

import numpy as np

from protos.gradients import Values
from protos.keys import Keys
from protos.runtime.jit import kernel, read_only
from protos.spec import TableSpec
from ps_server.table.memory.hash_index import (
    BLOCK,
    TableArrays,
    find_block,
    find_row,
    has_room,
    insert_row,
    shard_of_hash,
)
from ps_server.table.memory.intrinsics import Int
from ps_server.table.memory.layout import KEY_COLUMNS
from ps_server.table.sparse_table import SparseTable


class ReplicaTable(SparseTable):
    """All rows of a table, as one worker trains them. Thread-safe."""

    def __init__(self, spec: TableSpec) -> None:
        """Makes an empty table.

        Raises:
            SpecConflictError: If the spec is impossible.
        """
        super().__init__(spec, num_subscribers=1, has_base=True)

    def take_deltas(self, share: float) -> tuple[Keys, Values]:
        """Returns how far rows came since this was last called, times `share`.

        Their weights, like their base, are then the servers' with this added: what others sent meanwhile
        is still to be merged.

        Returns:
            Keys uint64[N], each once, and deltas float32[N, D]; untouched rows are not among them.
        """
        parts = [self._take_shard_deltas(shard, np.float32(share)) for shard in self.shards]
        return (
            np.concatenate([keys for keys, _ in parts]),
            np.concatenate([deltas for _, deltas in parts]),
        )

    def _take_shard_deltas(self, shard: int, share: np.float32) -> tuple[Keys, Values]:
        with self._locks[shard]:
            num_rows = int(self._num_rows[shard])
            keys = np.empty(num_rows, np.uint64)
            deltas = np.empty((num_rows, self.spec.dim), np.float32)
            count = _take_shard_deltas(self._arrays, shard, share, keys, deltas)
        return keys[:count], deltas[:count]

    def merge(self, keys: Keys, values: Values) -> None:
        """Takes over rows as the servers have them; what was trained since their deltas were taken stays.

        Args:
            keys: uint64[N].
            values: float32[N, D].
        """
        keys, values = read_only(keys), read_only(values)
        self._with_room(
            keys, lambda start: _merge_rows(self._arrays, self._initial_state, keys, values, start)
        )


@kernel
def _take_shard_deltas(
    table: TableArrays, shard: Int, share: np.float32, keys: Keys, deltas: Values
) -> int:
    """Takes the deltas of a shard's changed rows, and lets weights and base both be base + delta.

    Args:
        table: The table, which has one subscriber; updated in place.
        shard: Whose rows.
        share: What part of the way from base to weights a delta is.
        keys: uint64[N], overwritten from the front; N is at least the shard's rows.
        deltas: float32[N, D], overwritten from the front.

    Returns:
        How many rows had changed.
    """
    count, dim, base = 0, deltas.shape[1], table.base_column
    for row_in_shard in range(table.num_rows[shard]):
        position = shard * table.change_rows + row_in_shard
        if not table.change_words[position, 0]:
            continue
        table.change_words[position, 0] = np.uint64(0)
        row = shard * table.region_rows + row_in_shard
        keys[count] = table.keys[row, 0]
        for j in range(dim):
            delta = (table.slab[row, KEY_COLUMNS + j] - table.slab[row, base + j]) * share
            deltas[count, j] = delta
            table.slab[row, base + j] += delta
            table.slab[row, KEY_COLUMNS + j] = table.slab[row, base + j]
        count += 1
    return count


@kernel
def _merge_rows(
    table: TableArrays,
    initial_state: Values,
    keys: Keys,
    values: Values,
    start: int,
) -> int:
    """Makes `values` the base of the rows of `keys[start:]`, and moves their weights as far as the base.

    A row that is missing is created, with `values` as its weights. No subscriber hears of it.

    Args:
        table: The table, updated in place.
        initial_state: float32[state_width], state of a new row.
        keys: uint64[N].
        values: float32[N, D].
        start: First key.

    Returns:
        As `apply_rows` (rows/kernels.py).
    """
    hashes = np.empty(BLOCK, np.uint64)
    rows = np.empty(BLOCK, np.int64)
    dim, base = values.shape[1], table.base_column
    first_state = KEY_COLUMNS + dim
    while start < keys.size:
        stop = min(start + BLOCK, keys.size)
        find_block(table, keys, start, stop, hashes, rows)
        for i in range(stop - start):
            row, key = rows[i], keys[start + i]
            shard = shard_of_hash(table, hashes[i])
            if row < 0:
                row = find_row(table, shard, hashes[i], key)  # a key twice in this block
            if row < 0:
                if not has_room(table, shard):
                    return start + i
                row = insert_row(table, shard, hashes[i], key)
                table.slab[row, first_state:base] = initial_state
                table.slab[row, KEY_COLUMNS:first_state] = values[start + i]
                table.slab[row, base : base + dim] = values[start + i]
                continue
            for j in range(dim):
                value = values[start + i, j]
                table.slab[row, KEY_COLUMNS + j] += value - table.slab[row, base + j]
                table.slab[row, base + j] = value
        start = stop
    return start
