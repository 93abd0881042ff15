"""Initial values in Python's big integers and floats."""

import hashlib
import math

from ctr_ps.protos.spec import InitializerSpec
from tests.reference.partition import MASK, mix64

STEP = 0x9E3779B97F4A7C15


def _unit(row_hash: int, position: int) -> float:
    return (mix64((row_hash + position * STEP) & MASK) >> 11) / 2**53


def initial_row(spec: InitializerSpec, seed: int, name: str, key: int, dim: int) -> list[float]:
    """Returns the initial weights of a key, or (dim 1) of an element of a dense block."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    row_hash = mix64(key ^ int.from_bytes(digest[:8], "little"))
    first = [_unit(row_hash, 2 * column) for column in range(dim)]
    if spec.kind == "uniform":
        return [(2 * u - 1) * spec.scale for u in first]
    second = [_unit(row_hash, 2 * column + 1) for column in range(dim)]
    return [
        math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v) * spec.scale
        for u, v in zip(first, second, strict=True)
    ]
