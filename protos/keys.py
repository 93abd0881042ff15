"""Keys: uint64 hashes of feature values, their scramble, and the unique keys of a batch."""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import CtrPsError, ProtocolError
from ctr_ps.protos.runtime.jit import inlined_kernel, kernel, read_only

Keys = NDArray[np.uint64]


def require_uint64(keys: Keys) -> None:
    """Raises ProtocolError unless `keys` are uint64: other integers would be scrambled differently."""
    if keys.dtype != np.uint64:
        raise ProtocolError(f"keys are {keys.dtype}, expected uint64: convert them with astype")


@kernel
def mix64(x: np.uint64) -> np.uint64:
    """Returns a bijective scramble of uint64 `x`: splitmix64's finalizer.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the
    constants of Stafford's variant 13.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@inlined_kernel
def probe(slots: NDArray[np.int32], known: Keys, key: np.uint64) -> np.uint64:
    """Returns the slot of a key, or the empty slot where it belongs, by linear probing.

    `slots` int32[S], a power of two and not all full, have positions in `known` uint64[N], -1 if empty.
    """
    mask = np.uint64(slots.size - 1)
    slot = mix64(key) & mask
    while slots[slot] >= 0 and known[slots[slot]] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _unique_keys(
    keys: Keys,
    slots: NDArray[np.int32],
    unique: Keys,
    inverse: NDArray[np.int32],
) -> int:
    slots[:] = -1
    count = 0
    for i in range(keys.size):
        slot = probe(slots, unique, keys[i])
        if slots[slot] < 0:
            slots[slot] = count
            unique[count] = keys[i]
            count += 1
        inverse[i] = slots[slot]
    return count


def unique_keys(keys: Keys) -> tuple[Keys, NDArray[np.int32]]:
    """Returns the distinct keys uint64[N] in order of first appearance, and int32[L] `inverse`.

    `unique[inverse] == keys`. Raises ProtocolError unless keys are uint64.
    """
    require_uint64(keys)
    # A load factor of at most one half keeps probe sequences short.
    num_slots = 1 << max(4, (2 * keys.size - 1).bit_length())
    slots = np.empty(num_slots, np.int32)
    unique = np.empty(keys.size, np.uint64)
    inverse = np.empty(keys.size, np.int32)
    count = _unique_keys(keys, slots, unique, inverse)
    return unique[:count], inverse


_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _repeated_position(keys: Keys, slots: NDArray[np.int32], shift: np.uint64) -> int:
    mask = np.uint64(slots.size - 1)
    slots[:] = -1
    for i in range(keys.size):
        key = keys[i]
        slot = (key * _GOLDEN_RATIO) >> shift
        found = slots[slot]
        while found >= 0:
            if keys[found] == key:
                return i
            slot = (slot + np.uint64(1)) & mask
            found = slots[slot]
        slots[slot] = i
    return -1


def repeated_key(keys: Keys) -> int | None:
    """Returns a key that occurs twice in uint64[N] `keys`, or None.

    Every push and pull pays for it: four slots a key and one multiplication (Fibonacci hashing: Knuth, The
    Art of Computer Programming 3, section 6.4) take half the time of `mix64` with two.
    """
    require_uint64(keys)
    num_bits = max(4, (4 * keys.size - 1).bit_length())
    slots = np.empty(1 << num_bits, np.int32)
    position = _repeated_position(read_only(keys), slots, np.uint64(64 - num_bits))
    return None if position < 0 else int(keys[position])


def require_unique(what: str, keys: Keys, error: type[CtrPsError]) -> None:
    """Raises `error`, which names `what` and the key, if a key occurs twice in uint64[N] `keys`."""
    if (key := repeated_key(keys)) is not None:
        raise error(
            f"{what} has key {key} more than once: make keys unique by protos.keys.unique_keys; sum the "
            "gradients of equal keys, and index pulled rows by the inverse that it returns"
        )
