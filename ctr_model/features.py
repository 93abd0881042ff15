"""The feature hash: a stable, versioned mapping of the value in a slot to the key of its row.

    h = mix64(slot * GAMMA)
    h = mix64(h ^ w)         for each 8 bytes of the value, w little-endian, the last zero-padded
    key = mix64(h ^ length)  length in bytes, so that padding never makes two values equal

A cross of two features has the key

    mix64(mix64(first + GAMMA) ^ second)

of their keys. All arithmetic is modulo 2^64. The key depends on slot and value only: not on the process, the
machine, the order of values or a vocabulary. Keys are not reduced to a number of rows, so two values share a
row only if all 64 bits agree. A missing (empty) value has a key of its own in each slot.

`mix64` is the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014; constants as in Vigna's public-domain splitmix64.c), GAMMA its increment.
docs/features.md has test vectors. Changing the formula requires a new `HASH_VERSION`.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel

HASH_VERSION = 1
MAX_SLOT = 2**31 - 1

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


@kernel
def mix64(word: np.uint64) -> np.uint64:
    """Returns a bijective mix of 64 bits, in which every input bit affects every output bit."""
    word = (word ^ (word >> np.uint64(30))) * _MULTIPLIER_1
    word = (word ^ (word >> np.uint64(27))) * _MULTIPLIER_2
    return word ^ (word >> np.uint64(31))


@kernel
def hash_bytes(buffer: NDArray[np.uint8], start: int, stop: int, slot: int) -> np.uint64:
    """Returns the key of the value `buffer[start:stop]` in slot number `slot`."""
    state = mix64(np.uint64(slot) * GAMMA)
    word = np.uint64(0)
    shift = np.uint64(0)
    for position in range(start, stop):
        word |= np.uint64(buffer[position]) << shift
        shift += np.uint64(8)
        if shift == np.uint64(64):
            state = mix64(state ^ word)
            word = np.uint64(0)
            shift = np.uint64(0)
    if shift > np.uint64(0):
        state = mix64(state ^ word)
    return mix64(state ^ np.uint64(stop - start))


@kernel
def cross_key(first: np.uint64, second: np.uint64) -> np.uint64:
    """Returns the key of the cross of two features; their order matters."""
    return mix64(mix64(first + GAMMA) ^ second)


def key_of(slot: int, value: str | bytes) -> int:
    """Returns the uint64 key of `value`; "07" and "7" differ. ValueError: no `slot` from 1 to MAX_SLOT."""
    if not 1 <= slot <= MAX_SLOT:
        raise ValueError(f"slot numbers run from 1 to {MAX_SLOT}, got {slot!r}")
    data = value.encode() if isinstance(value, str) else value
    return int(hash_bytes(np.array(bytearray(data), np.uint8), 0, len(data), slot))
