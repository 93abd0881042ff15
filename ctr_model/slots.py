"""Selection of the keys of a batch to look up in a table: slots, and crosses of two slots.

A cross is a virtual slot: each pair of keys of its two slots is a feature with their `cross_key`. It is empty
if either slot is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import cross_key
from ctr_ps.ctr_model.jit import kernel

_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SlotKeys:
    """Keys by example and slot, in the layout of `Batch`; S counts slots and crosses."""

    keys: NDArray[np.uint64]
    offsets: NDArray[np.int32]
    num_slots: int


def select_slots(
    batch: Batch, slots: tuple[int, ...] | None, crosses: tuple[tuple[int, int], ...] = ()
) -> SlotKeys:
    """Returns the keys of slots, by number from 0 (None: all), then those of crosses."""
    if slots is None and not crosses:
        return SlotKeys(batch.keys, batch.offsets, batch.num_slots)
    plain = range(batch.num_slots) if slots is None else slots
    sources = np.array([*((slot, _NO_SLOT) for slot in plain), *crosses], np.int32).reshape(-1, 2)
    offsets = np.empty(batch.size * len(sources) + 1, np.int32)
    _count_keys(batch.offsets, batch.num_slots, sources, offsets)
    keys = np.empty(offsets[-1], np.uint64)
    _copy_keys(batch.keys, batch.offsets, batch.num_slots, sources, keys)
    return SlotKeys(keys, offsets, len(sources))


@kernel
def _count_keys(
    offsets: NDArray[np.int32],
    num_slots: int,
    sources: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    """Overwrites `out` int32[B * T + 1] with the offsets of the slots `sources` int32[T, 2]."""
    out[0] = 0
    position = 0
    for b in range((offsets.size - 1) // num_slots):
        for first, second in sources:
            i = b * num_slots + first
            count = offsets[i + 1] - offsets[i]
            if second != _NO_SLOT:
                i = b * num_slots + second
                count *= offsets[i + 1] - offsets[i]
            out[position + 1] = out[position] + count
            position += 1


@kernel
def _copy_keys(
    keys: NDArray[np.uint64],
    offsets: NDArray[np.int32],
    num_slots: int,
    sources: NDArray[np.int32],
    out: NDArray[np.uint64],
) -> None:
    """Overwrites `out` uint64[L] with the keys of the slots `sources` int32[T, 2]."""
    position = 0
    for b in range((offsets.size - 1) // num_slots):
        for first, second in sources:
            slot = b * num_slots + first
            for i in range(offsets[slot], offsets[slot + 1]):
                if second == _NO_SLOT:
                    out[position] = keys[i]
                    position += 1
                else:
                    other = b * num_slots + second
                    for j in range(offsets[other], offsets[other + 1]):
                        out[position] = cross_key(keys[i], keys[j])
                        position += 1
