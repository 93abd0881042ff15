"""Keys of slots for tests of layers: none, one or several in a slot, also repeated."""

import numpy as np
from hypothesis import strategies as st

from ctr_ps.ctr_model.parameters import Lookup

Slots = list[list[int]]
"""For each slot of all examples, which unique keys it holds."""


def slots_of(num_unique: int, num_slots: int, most: int = 3) -> st.SearchStrategy[Slots]:
    """Returns a strategy for that many slots with up to `most` keys each."""
    keys = st.lists(st.integers(0, num_unique - 1), max_size=most)
    return st.lists(keys, min_size=num_slots, max_size=num_slots)


def lookup_of(rows: np.ndarray, slots: Slots, num_slots: int) -> Lookup:
    """Returns the lookup of examples with `num_slots` slots."""
    inverse = np.array([key for slot in slots for key in slot], np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in slots])]).astype(np.int32)
    return Lookup(rows, inverse, offsets, num_slots)
