"""A batch of examples as arrays, from readers to models.

Slots may hold any number of keys, so `keys` is one flat array with `offsets` (CSR), by example and slot:

    example          0                 1
    slot          0     1     2     0     1     2
    keys        [ a  |  b c | d   | e   |     | f  ]
    offsets     [ 0     1     3     4     5     5     6 ]
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of B examples. Its arrays are shared and must not be written to.

    Attributes:
        labels: float32[B], 1.0 for a click, else 0.0; None for rows without labels.
        dense: float32[B, num_dense], transformed and scaled by the schema.
        keys: uint64[L], all occurrences, by example and slot.
        offsets: int32[B * S + 1], from 0 to L; example `b`, slot `s` (from 0) owns
            `keys[offsets[b * S + s] : offsets[b * S + s + 1]]`.
        num_slots: S.
    """

    labels: NDArray[np.float32] | None
    dense: NDArray[np.float32]
    keys: NDArray[np.uint64]
    offsets: NDArray[np.int32]
    num_slots: int

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return len(self.dense)
