"""Embeddings looked up in a table for a batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_model.parameters import Floats

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The rows of a batch's unique keys in one table, and their mapping to examples and slots.

    Attributes:
        rows: float32[N, D], the embeddings of the unique keys of the table's slots.
        inverse: int32[L]; occurrence `i` is unique key `inverse[i]`.
        offsets: int32[B * S + 1]; example `b`, slot `s` owns the occurrences
            `offsets[b * S + s]` to `offsets[b * S + s + 1]`, exclusive.
        num_slots: S, the table's slots and crosses.
    """

    rows: Floats
    inverse: Ints
    offsets: Ints
    num_slots: int
