"""A batch of examples as arrays, from readers to models.

Slots may hold any number of keys, so `keys` is one flat array with `offsets` (CSR), by example and slot:

    example          0                 1
    slot          0     1     2     0     1     2
    keys        [ a  |  b c | d   | e   |     | f  ]
    offsets     [ 0     1     3     4     5     5     6 ]
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_COLUMNS = ("labels", "other_labels", "weights", "ids", "groups")
"""Columns of a `Batch` with one entry an example, each of which data may lack."""

GROUP_SLOT = 1
"""Slot number that the values of `Batch.groups` are hashed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of B examples. Its arrays are shared and must not be written to."""

    # float32[B], 1.0 for a click, else 0.0; None for rows without labels
    labels: NDArray[np.float32] | None = None
    # float32[B, T - 1], the other labels of a schema of T, 1.0 or 0.0; None: there are none
    other_labels: NDArray[np.float32] | None = None
    dense: NDArray[np.float32]  # float32[B, num_dense], transformed and scaled by the schema
    keys: NDArray[np.uint64]  # uint64[L], all occurrences, by example and slot
    # int32[B * S + 1], from 0 to L; example `b`, slot `s` (from 0) owns
    # `keys[offsets[b * S + s] : offsets[b * S + s + 1]]`
    offsets: NDArray[np.int32]
    num_slots: int  # S
    # float32[B], sample weights of at least 0; None: every example has weight 1
    weights: NDArray[np.float32] | None = None
    # object[B] of str, to name predictions by; None where they were not read
    ids: NDArray[np.object_] | None = None
    # uint64[B], keys in `GROUP_SLOT`, to group figures by; None where they were not read
    groups: NDArray[np.uint64] | None = None

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return len(self.dense)

    @property
    def weight(self) -> float:
        """Sum of the weights; B without weights."""
        return self.size if self.weights is None else float(self.weights.sum(dtype=np.float64))

    @property
    def all_labels(self) -> NDArray[np.float32] | None:
        """The labels of all tasks, float32[B], of several float32[B, T]; None for rows without labels."""
        if self.labels is None or self.other_labels is None:
            return self.labels
        return np.column_stack([self.labels, self.other_labels])

    def row_columns(self) -> dict[str, NDArray[Any]]:
        """Returns the `ROW_COLUMNS` that the batch has, by name."""
        columns = {name: getattr(self, name) for name in ROW_COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}
