"""bfloat16: a float32 without the lower half of its bits, for numbers on the wire.

    float32    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm
    bfloat16   s eeeeeeee mmmmmmm                     rounded to nearest, ties to even

It has the range of float32, so no gradient of any use overflows or vanishes, and 8 significant bits: rounding
changes a number by 1/256 of it at most, except below 1e-38. The largest are truncated, not rounded, so that
finite numbers stay finite.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.jit import kernel, read_only

BFloat16s = NDArray[np.uint16]
"""The bits of numbers."""

_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_EXPONENT, _QUIET_NAN = np.uint32(0x7F80), np.uint32(0x0040)
_HALF, _ONE, _BITS = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)


@kernel
def _round(bits: NDArray[np.uint32], out: BFloat16s) -> None:
    # Without branches, so that the compiler takes many numbers at once.
    for i in range(bits.size):
        upper = np.uint32(bits[i] >> _BITS)
        nearest = np.uint32(bits[i] + _HALF + (upper & _ONE)) >> _BITS
        finite = upper if nearest & _EXPONENT == _EXPONENT else nearest
        # What is not a number must not become infinite, where its bits are in the lower half.
        out[i] = upper | _QUIET_NAN if bits[i] & _MAGNITUDE > _INFINITE else finite


@kernel
def _widen(halves: BFloat16s, out: NDArray[np.uint32]) -> None:
    for i in range(halves.size):
        out[i] = np.uint32(halves[i]) << _BITS


def to_bfloat16(values: Values) -> BFloat16s:
    """Returns the nearest bfloat16 of float32 of any shape, flat; finite numbers stay finite."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    out = np.empty(bits.size, np.uint16)
    _round(read_only(bits), out)
    return out


def from_bfloat16(halves: BFloat16s) -> Values:
    """Returns bfloat16[n] as the same numbers, a read-only float32[n]."""
    out = np.empty(halves.size, np.uint32)
    _widen(read_only(halves), out)
    return read_only(out.view(np.float32))
