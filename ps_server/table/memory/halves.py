"""16-bit weights: bfloat16, the upper half of a float32, rounded at random.

    float32 = | sign, exponent, 7 bits of the fraction: stored | 16 bits: cut |

A value is rounded away from zero with the probability cut / 2^16, else towards it, so that its mean is the
value: rounded to the nearest, a row would lose every update smaller than half its last bit. Gupta, Agrawal,
Gopalakrishnan, Narayanan, "Deep learning with limited numerical precision", ICML 2015.

The random bits are a function of (key, draw, column): of a synchronous step, the draw is the batches applied
before, else it is made of the push's id. A recovery and any number of servers round alike. A value that a
bfloat16 holds is stored as it is.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import inlined_kernel
from ctr_ps.ps_server.table.memory.intrinsics import Int

Halves = NDArray[np.uint16]
"""Weights as bfloat16."""

_EXPONENT = np.uint32(0x7F800000)
_STORED = np.uint32(0xFFFF0000)


def to_float32(halves: Halves) -> Values:
    """Returns bfloat16 as float32 of the same shape."""
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def holds(weights: Values) -> bool:
    """Whether bfloat16 holds all weights float32[N, D] as they are."""
    return not np.any(weights.view(np.uint32) & np.uint32(0xFFFF))


@inlined_kernel
def half_value(half: np.uint16) -> np.float32:
    """Returns a bfloat16 as float32."""
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@inlined_kernel
def rounding_of(key: np.uint64, draw: np.uint64) -> np.uint32:
    """Returns what `rounded_half` takes for a row."""
    return np.uint32(mix64(key ^ mix64(draw)) >> np.uint64(32))


@inlined_kernel
def rounded_half(weight: np.float32, rounding: np.uint32, column: Int) -> np.uint16:
    """Returns a weight as bfloat16; without branches, so that loops over it become vectors."""
    # One round of a 32-bit mixer by Wellons, "Prospecting for hash functions", 2018.
    random = np.uint32(rounding + np.uint32(column) * np.uint32(0x9E3779B9))
    random = np.uint32((random ^ (random >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.float32(weight).view(np.uint32)
    near = np.uint32(bits & _STORED)
    far = np.uint32((bits + (random >> np.uint32(16))) & _STORED)
    is_finite = bits & _EXPONENT != _EXPONENT and far & _EXPONENT != _EXPONENT
    is_nan = bits & np.uint32(0x7FFFFFFF) > _EXPONENT
    rounded = np.uint32(far if is_finite else near)
    return np.uint16(np.uint32(rounded >> np.uint32(16)) | np.uint32(is_nan))


@inlined_kernel
def round_weights(weights: Values, key: np.uint64, draw: np.uint64) -> None:
    """Rounds `weights` float32[D] in place, as `store_halves` does."""
    rounding = rounding_of(key, draw)
    for j in range(weights.size):
        weights[j] = half_value(rounded_half(weights[j], rounding, j))


@inlined_kernel
def store_halves(weights: Values, halves: Halves, key: np.uint64, draw: np.uint64) -> None:
    """Overwrites `halves` uint16[D] with `weights` float32[D], rounded at random by key and draw."""
    rounding = rounding_of(key, draw)
    for j in range(weights.size):
        halves[j] = rounded_half(weights[j], rounding, j)


@inlined_kernel
def load_halves(halves: Halves, weights: Values) -> None:
    """Overwrites `weights` float32[D] with `halves` uint16[D]."""
    for j in range(weights.size):
        weights[j] = half_value(halves[j])
