"""A table that a worker trains apart from the servers, and that knows what they had.

    row = | key | weights | optimizer state | base: dim x float32 | padding |

`base` is the servers' row, as far as this worker knows. Deltas are taken of the rows that were trained since
they were last taken; rows of the servers are merged in.
"""

import numpy as np

from protos.gradients import Values
from protos.keys import Keys
from protos.spec import TableSpec
from ps_server.table.memory.frozen import frozen
from ps_server.table.rows.replica_kernels import merge_rows, take_shard_deltas
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
            count = take_shard_deltas(self._arrays, shard, share, keys, deltas)
        return keys[:count], deltas[:count]

    def merge(self, keys: Keys, values: Values) -> None:
        """Takes over rows as the servers have them; what was trained since their deltas were taken stays.

        Args:
            keys: uint64[N].
            values: float32[N, D].
        """
        keys, values = frozen(keys), frozen(values)
        self._with_room(
            keys, lambda start: merge_rows(self._arrays, self._initial_state, keys, values, start)
        )
