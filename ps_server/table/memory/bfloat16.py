"""Weights of rows as bfloat16, the upper half of a float32, rounded at random.

    float32 = | sign, exponent, 7 bits of the fraction: stored | 16 bits: cut |

A value is rounded away from zero with the probability cut / 2^16, else towards it, so that its mean is the
value: rounded to the nearest, a row would lose every update smaller than half its last bit. Gupta, Agrawal,
Gopalakrishnan, Narayanan, "Deep learning with limited numerical precision", ICML 2015.

The random bits are a function of (key, draw, column): of a synchronous step, the draw is the batches applied
before, else it is made of the push's id. A recovery and any number of servers round alike. A value without
lower bits is stored as it is.
"""

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import inlined_kernel
from ctr_ps.protos.wire.encoding.arrays import BFloat16s
from ctr_ps.ps_server.table.memory.intrinsics import Int

_EXPONENT = np.uint32(0x7F800000)
_STORED = np.uint32(0xFFFF0000)


def are_bfloat16(weights: Values) -> bool:
    """Whether all weights float32[N, D] are stored as they are."""
    return not np.any(weights.view(np.uint32) & np.uint32(0xFFFF))


@inlined_kernel
def widened(stored: np.uint16) -> np.float32:
    """Returns a bfloat16 as float32."""
    return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)


@inlined_kernel
def random_of(key: np.uint64, draw: np.uint64) -> np.uint32:
    """Returns random bits for the rounding of a row."""
    return np.uint32(mix64(key ^ mix64(draw)) >> np.uint64(32))


@inlined_kernel
def rounded(weight: np.float32, random: np.uint32, column: Int) -> np.uint16:
    """Returns a weight as bfloat16; without branches, so that loops over it become vectors."""
    # One round of a 32-bit mixer by Wellons, "Prospecting for hash functions", 2018.
    mixed = np.uint32(random + np.uint32(column) * np.uint32(0x9E3779B9))
    mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x7FEB352D))
    bits = np.float32(weight).view(np.uint32)
    near = np.uint32(bits & _STORED)
    far = np.uint32((bits + (mixed >> np.uint32(16))) & _STORED)
    is_finite = bits & _EXPONENT != _EXPONENT and far & _EXPONENT != _EXPONENT
    is_nan = bits & np.uint32(0x7FFFFFFF) > _EXPONENT
    chosen = np.uint32(far if is_finite else near)
    return np.uint16(np.uint32(chosen >> np.uint32(16)) | np.uint32(is_nan))


@inlined_kernel
def round_weights(weights: Values, key: np.uint64, draw: np.uint64) -> None:
    """Rounds `weights` float32[D] in place, as `store_bfloat16` does."""
    random = random_of(key, draw)
    for j in range(weights.size):
        weights[j] = widened(rounded(weights[j], random, j))


@inlined_kernel
def store_bfloat16(weights: Values, stored: BFloat16s, key: np.uint64, draw: np.uint64) -> None:
    """Overwrites `stored` uint16[D] with `weights` float32[D], rounded at random by key and draw."""
    random = random_of(key, draw)
    for j in range(weights.size):
        stored[j] = rounded(weights[j], random, j)


@inlined_kernel
def load_bfloat16(stored: BFloat16s, weights: Values) -> None:
    """Overwrites `weights` float32[D] with `stored` uint16[D]."""
    for j in range(weights.size):
        weights[j] = widened(stored[j])
