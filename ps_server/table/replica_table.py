"""Replica table: a worker's copy of a table in GEO training, trained locally between exchanges.

    row = | key | weights | optimizer state | base: dim x float32 | padding |

The base is the servers' row as this worker last knew it. Deltas of trained rows are taken for the servers;
rows that the servers changed are merged.
"""

from dataclasses import replace

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import kernel, read_only
from ctr_ps.protos.spec import TableSpec
from ctr_ps.ps_server.table.memory.hash_index import (
    BLOCK,
    KEY_COLUMNS,
    TableArrays,
    find_block,
    find_row,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int
from ctr_ps.ps_server.table.sparse_table import SparseTable


class ReplicaTable(SparseTable):
    """A worker's float32 replica of a table, empty at first. Thread-safe; SpecError if `spec` is invalid."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(replace(spec, is_bfloat16=False), num_subscribers=1, has_base=True)

    def take_deltas(self, share: float) -> tuple[Keys, Values]:
        """Returns `share` times the change of each row trained since the last call, and adds it to the base.

        Weights are set to the new base, the servers' row but for other workers' changes, which `merge` adds.
        Unique keys uint64[N] and deltas float32[N, D], of trained rows only.
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
        """Replaces the base of rows by the servers' rows, keys uint64[N] and values float32[N, D].

        Changes that were not taken yet are kept. Raises ProtocolError, without a change, if the rows have
        another width.
        """
        if values.shape != (keys.size, self.spec.dim):
            raise ProtocolError(
                f"values for {keys.size} rows of table {self.spec.name!r} have shape {values.shape}, "
                f"expected dim {self.spec.dim}"
            )
        keys, values = read_only(keys), read_only(values)
        state = self._new_row.state
        self._with_room(keys, lambda start: _merge_rows(self._arrays, state, keys, values, start))


@kernel
def _take_shard_deltas(
    table: TableArrays, shard: Int, share: np.float32, keys: Keys, deltas: Values
) -> int:
    """Takes the deltas of a shard's changed rows, and sets weights and base both to base + delta.

    A delta is `share` of weights - base. Overwrites `keys` uint64[N] and `deltas` float32[N, D] from the
    front, where N is at least the shard's rows; returns the number of changed rows.
    """
    count, dim, base = 0, deltas.shape[1], table.base_column
    for row_in_shard in range(table.num_rows[shard]):
        position = shard * table.change_rows + row_in_shard
        if not table.change_bytes[position, 0]:
            continue
        table.change_bytes[position, 0] = np.uint8(0)
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
    table: TableArrays, initial_state: Values, keys: Keys, values: Values, start: int
) -> int:
    """Makes `values` float32[N, D] the base of the rows of `keys[start:]`, and moves their weights with it.

    A missing row is created, with `values` as its weights. The rows do not count as changed. Returns the same
    as `apply_rows` (rows/kernels.py).
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
