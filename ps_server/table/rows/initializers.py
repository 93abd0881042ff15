"""Initializers: initial weights as a function of (seed, name, key, column), the same on every server.

Each value takes the bits of a counter-based generator: mix64 of the row's hash plus the column times an
odd constant (splitmix64, Steele, Lea, Flood, OOPSLA 2014).
"""

import hashlib
import math
from typing import NamedTuple

import numpy as np

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import InitializerSpec
from ctr_ps.protos.wire.encoding.arrays import BFloat16s
from ctr_ps.ps_server.table.memory.bfloat16 import random_of, round_weights, rounded

KINDS = ("uniform", "normal")

MAX_SCALE = 1e6


class Initializer(NamedTuple):
    """An initializer as kernels see it."""

    is_normal: bool
    scale: np.float32
    seed: np.uint64
    is_bfloat16: bool  # whether rows are rounded


def build_initializer(
    spec: InitializerSpec, seed: int, name: str, *, is_bfloat16: bool = False
) -> Initializer:
    """Returns the initializer of the table or dense block `name`; raises SpecError if it is invalid."""
    if spec.kind not in KINDS:
        raise SpecError(
            f"{name!r} has initializer {spec.kind!r}, expected one of {', '.join(KINDS)}"
        )
    if not 0 <= spec.scale <= MAX_SCALE:  # also refuses NaN
        raise SpecError(f"{name!r} has initial scale {spec.scale!r}, expected 0 to {MAX_SCALE:g}")
    if not 0 <= seed < 2**64:
        raise SpecError(f"{name!r} has seed {seed}, expected 0 to 2^64 - 1")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return Initializer(
        is_normal=spec.kind == "normal",
        scale=np.float32(spec.scale),
        seed=np.uint64(int.from_bytes(digest[:8], "little")),
        is_bfloat16=is_bfloat16,
    )


@kernel
def _unit(bits: np.uint64) -> float:
    # The top 53 bits as a float64 in [0, 1).
    return np.float64(bits >> np.uint64(11)) * 2.0**-53


@kernel
def initial_value(initializer: Initializer, row_hash: np.uint64, column: int) -> np.float32:
    """Returns the initial value of one column of the row with `row_hash`."""
    step = np.uint64(0x9E3779B97F4A7C15)
    first = _unit(mix64(row_hash + np.uint64(2 * column) * step))
    if not initializer.is_normal:
        return np.float32((2.0 * first - 1.0) * initializer.scale)
    # Box and Muller, 1958; 1 - u is in (0, 1], so the logarithm is finite.
    second = _unit(mix64(row_hash + np.uint64(2 * column + 1) * step))
    radius = math.sqrt(-2.0 * math.log(1.0 - first))
    return np.float32(radius * math.cos(2.0 * math.pi * second) * initializer.scale)


@kernel
def initialize_row(initializer: Initializer, key: np.uint64, out: Values) -> None:
    """Overwrites `out` float32[D] with the initial weights of `key`."""
    if initializer.scale == np.float32(0.0):
        out[:] = np.float32(0.0)
        return
    row_hash = mix64(key ^ initializer.seed)
    for column in range(out.size):
        out[column] = initial_value(initializer, row_hash, column)
    if initializer.is_bfloat16:
        round_weights(out, key, np.uint64(0))


@kernel
def initialize_bfloat16(initializer: Initializer, key: np.uint64, stored: BFloat16s) -> None:
    """Same as `initialize_row`, for the bfloat16 weights of a row, uint16[D], which are 0."""
    if initializer.scale == np.float32(0.0):
        return
    row_hash, random = mix64(key ^ initializer.seed), random_of(key, np.uint64(0))
    for column in range(stored.size):
        value = initial_value(initializer, row_hash, column)
        stored[column] = rounded(value, random, column)


@kernel
def initialize_elements(initializer: Initializer, start: int, out: Values) -> None:
    """Overwrites `out` with the initial values of a dense block's elements `start`, `start + 1`, ..."""
    for i in range(out.size):
        row_hash = mix64(np.uint64(start + i) ^ initializer.seed)
        out[i] = initial_value(initializer, row_hash, 0)
