"""Unique keys of a batch: keys are unique in every pull and push (the trainer removes duplicates)."""

import numpy as np
from numpy.typing import NDArray

from protos.jit import kernel
from protos.partition import Keys, mix64, require_uint64


@kernel
def _unique_keys(
    keys: Keys,
    slots: NDArray[np.int32],
    unique: Keys,
    inverse: NDArray[np.int32],
) -> int:
    mask = np.uint64(slots.size - 1)
    slots[:] = -1
    count = 0
    for i in range(keys.size):
        key = keys[i]
        slot = mix64(key) & mask
        found = slots[slot]
        while found >= 0 and unique[found] != key:
            slot = (slot + np.uint64(1)) & mask
            found = slots[slot]
        if found < 0:
            found = count
            slots[slot] = found
            unique[found] = key
            count += 1
        inverse[i] = found
    return count


def unique_keys(keys: Keys) -> tuple[Keys, NDArray[np.int32]]:
    """Returns the distinct keys in order of first appearance, and where each key went.

    Args:
        keys: uint64[L].

    Returns:
        `unique` uint64[N] and `inverse` int32[L] with `unique[inverse] == keys`.

    Raises:
        ProtocolError: If keys are not uint64.
    """
    require_uint64(keys)
    # A load factor of at most one half keeps probe sequences short.
    num_slots = 1 << max(4, (2 * keys.size - 1).bit_length())
    slots = np.empty(num_slots, np.int32)
    unique = np.empty(keys.size, np.uint64)
    inverse = np.empty(keys.size, np.int32)
    count = _unique_keys(keys, slots, unique, inverse)
    return unique[:count], inverse
