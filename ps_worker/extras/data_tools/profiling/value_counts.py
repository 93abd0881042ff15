"""Number of distinct keys, and the most frequent ones, in bounded memory.

Counts are exact up to `MAX_EXACT` distinct keys. Beyond that:

- When the table is full, the median of the counts is subtracted from all of them, and keys without a positive
  count are removed (Misra and Gries, "Finding repeated elements", 1982, with many decrements at once). Counts
  are then too small by at most the sum of these medians, which is known.
- The number of distinct keys is that of a HyperLogLog with 2^14 registers (standard error 0.81 %), with the
  estimator of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017, algorithm 6,
  which needs no correction table.

(For n keys the sum of medians is at most 2 n / MAX_EXACT, since each is subtracted from at least half of a
full table.)
"""

import math

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import mix64
from ctr_ps.ctr_model.jit import kernel

MAX_EXACT = 1 << 16

_FIRST_CAPACITY = 1 << 8
_INDEX_BITS = 14
_NUM_REGISTERS = 1 << _INDEX_BITS
_MAX_RANK = 64 - _INDEX_BITS + 1
_INDEX_SHIFT = np.uint64(64 - _INDEX_BITS)
_TOP_BIT = np.uint64(63)


class ValueCounts:
    """Counts of uint64 keys. For one thread.

    Attributes:
        undercount: The largest error of the counts of `top`, which may be too small; 0 while exact.
    """

    def __init__(self) -> None:
        self.undercount = 0
        self._keys = np.empty(_FIRST_CAPACITY, np.uint64)
        self._counts = np.zeros(_FIRST_CAPACITY, np.int64)  # 0 for empty places
        self._used = 0
        self._registers = np.zeros(_NUM_REGISTERS, np.uint8)

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Counts keys, uint64[n]."""
        position = 0
        while True:
            position, self._used = _count(
                keys, position, self._used, self._keys, self._counts, self._registers
            )
            if position == len(keys):
                return
            self._make_room()

    @property
    def is_exact(self) -> bool:
        """Whether `num_distinct` and the counts are exact."""
        return self.undercount == 0

    @property
    def num_distinct(self) -> int:
        """Number of distinct keys, estimated unless `is_exact`."""
        return self._used if self.is_exact else round(_estimate(self._registers))

    def top(self, num_keys: int) -> list[tuple[int, int]]:
        """Returns the most frequent keys and their counts, in descending order."""
        is_used = self._counts > 0
        keys, counts = self._keys[is_used], self._counts[is_used]
        order = np.lexsort((keys, -counts))[:num_keys]
        return [(int(keys[i]), int(counts[i])) for i in order]

    def _make_room(self) -> None:
        is_used = self._counts > 0
        keys, counts = self._keys[is_used], self._counts[is_used]
        capacity = len(self._keys)
        if self._used < MAX_EXACT:
            capacity *= 2
        else:
            median = int(np.partition(counts, len(counts) // 2)[len(counts) // 2])
            self.undercount += median
            is_left = counts > median
            keys, counts = keys[is_left], counts[is_left] - median
        self._keys = np.empty(capacity, np.uint64)
        self._counts = np.zeros(capacity, np.int64)
        self._used = len(keys)
        _insert(keys, counts, self._keys, self._counts)


@kernel
def _find(
    key: np.uint64, hashed: np.uint64, keys: NDArray[np.uint64], counts: NDArray[np.int64]
) -> int:
    """Returns the place of a key in the table, or the empty place for it."""
    mask = np.uint64(len(keys) - 1)
    slot = hashed & mask
    while counts[slot] > 0 and keys[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return int(slot)


@kernel
def _insert(
    new_keys: NDArray[np.uint64],
    new_counts: NDArray[np.int64],
    keys: NDArray[np.uint64],
    counts: NDArray[np.int64],
) -> None:
    """Inserts new keys into a table with enough empty places."""
    for i in range(len(new_keys)):
        slot = _find(new_keys[i], mix64(new_keys[i]), keys, counts)
        keys[slot] = new_keys[i]
        counts[slot] = new_counts[i]


@kernel
def _add_to_sketch(hashed: np.uint64, registers: NDArray[np.uint8]) -> None:
    """Adds a key to the HyperLogLog: its first bits choose a register, the rank is 1 + the zeros after."""
    rest = hashed << np.uint64(_INDEX_BITS)
    rank = 1
    while rank < _MAX_RANK and (rest >> _TOP_BIT) == 0:
        rest <<= np.uint64(1)
        rank += 1
    index = hashed >> _INDEX_SHIFT
    registers[index] = max(registers[index], rank)


@kernel
def _count(
    new_keys: NDArray[np.uint64],
    position: int,
    num_used: int,
    keys: NDArray[np.uint64],
    counts: NDArray[np.int64],
    registers: NDArray[np.uint8],
) -> tuple[int, int]:
    """Counts keys until the table is half full; returns the next position and the number of used places."""
    for i in range(position, len(new_keys)):
        hashed = mix64(new_keys[i])
        slot = _find(new_keys[i], hashed, keys, counts)
        if counts[slot] == 0:
            if 2 * num_used == len(keys):
                return i, num_used
            num_used += 1
            keys[slot] = new_keys[i]
            _add_to_sketch(hashed, registers)
        counts[slot] += 1
    return len(new_keys), num_used


def _estimate(registers: NDArray[np.uint8]) -> float:
    """Returns the estimated number of distinct keys."""
    num_registers = len(registers)
    of_rank = np.bincount(registers, minlength=_MAX_RANK + 1)
    z = 0.0  # without the largest rank, which takes 2^60 keys
    for rank in range(_MAX_RANK - 1, 0, -1):
        z = 0.5 * (z + of_rank[rank])
    z += num_registers * _sigma(of_rank[0] / num_registers)
    return num_registers**2 / (2 * math.log(2) * z)


def _sigma(x: float) -> float:
    """Returns x + sum over k >= 1 of x^(2^k) 2^(k - 1), for x < 1."""
    total, factor = x, 1.0
    while True:
        x *= x
        before = total
        total += x * factor
        factor *= 2
        if total == before:
            return total
