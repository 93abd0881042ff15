"""Embedding lookups of a batch: the unique keys of each table, and their occurrences.

batch --select--> keys of a table's slots --unique--> pull --> rows --> Lookup
                                          --count---> push
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.parameters import EmbeddingTable, Lookup, SlotKeys, select_slots
from ctr_ps.protos.gradients import NUM_COUNTS, Counts, Values
from ctr_ps.protos.keys import Keys, unique_keys
from ctr_ps.protos.runtime.jit import kernel


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The keys of one batch, by table; `unique` uint64[N] are to be pulled."""

    unique: Mapping[str, Keys]
    _inverse: Mapping[str, NDArray[np.int32]]
    _slots: Mapping[str, SlotKeys]

    def lookups(self, rows: Mapping[str, Values]) -> dict[str, Lookup]:
        """Returns the model's lookups of the pulled rows, float32[N, D] by table."""
        return {
            name: Lookup(rows[name], self._inverse[name], slots.offsets, slots.num_slots)
            for name, slots in self._slots.items()
        }

    def counts(self, labels: NDArray[np.float32], tables: Collection[str]) -> dict[str, Counts]:
        """Returns shows and clicks of each unique key, uint32[N, 2] by table, for `labels` float32[B].

        Tables with the same slots share the array.
        """
        found: dict[int, Counts] = {}
        counts: dict[str, Counts] = {}
        for name in tables:
            inverse, slots = self._inverse[name], self._slots[name]
            if id(inverse) not in found:
                out = np.zeros((self.unique[name].size, NUM_COUNTS), np.uint32)
                _count_occurrences(inverse, slots.offsets, slots.num_slots, labels, out)
                found[id(inverse)] = out
            counts[name] = found[id(inverse)]
        return counts


@kernel
def _count_occurrences(
    inverse: NDArray[np.int32],
    offsets: NDArray[np.int32],
    num_slots: int,
    labels: NDArray[np.float32],
    out: Counts,
) -> None:
    """Adds the occurrences of a batch to `out` uint32[N, 2]; arrays are as in SlotKeys."""
    for b in range(labels.size):
        clicked = labels[b] > np.float32(0.5)
        for i in range(offsets[b * num_slots], offsets[(b + 1) * num_slots]):
            out[inverse[i], 0] += np.uint32(1)
            out[inverse[i], 1] += np.uint32(clicked)


def keys_of_batch(batch: Batch, tables: Sequence[EmbeddingTable]) -> BatchKeys:
    """Returns the lookup keys of a batch; tables with the same slots share them."""
    found: dict[object, tuple[SlotKeys, Keys, NDArray[np.int32]]] = {}
    for table in tables:
        source = (table.slots, table.crosses)
        if source not in found:
            slots = select_slots(batch, table.slots, table.crosses)
            found[source] = (slots, *unique_keys(slots.keys))
    of_table = {table.name: found[table.slots, table.crosses] for table in tables}
    return BatchKeys(
        unique={name: unique for name, (_, unique, _) in of_table.items()},
        _inverse={name: inverse for name, (_, _, inverse) in of_table.items()},
        _slots={name: slots for name, (slots, _, _) in of_table.items()},
    )
