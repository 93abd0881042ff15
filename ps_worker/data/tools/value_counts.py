"""How many different keys there are, and which are the most frequent, in bounded memory.

Keys are counted exactly while no more than `MAX_EXACT` different ones have come. From then on:

- When the table is full, the median of the counts is taken off all of them, and keys without a count left go
  (Misra and Gries, "Finding repeated elements", 1982, many decrements at once). A count is then too small, by
  at most the sum of those medians, which is known.
- The number of different keys is that of a HyperLogLog with 2^14 registers, whose standard error is 0.81 %,
  read with the estimator of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017,
  algorithm 6, which needs no table of corrections.

(Of n keys, the sum of medians is at most 2 n / MAX_EXACT: each is taken off at least half of a full table.)
"""

import math

import numpy as np
from numpy.typing import NDArray

from ctr_model.features import mix64
from ctr_model.jit import kernel

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
        undercount: By how much a count of `top` may be too small; 0 while all is exact.
    """

    def __init__(self) -> None:
        """Has counted nothing."""
        self.undercount = 0
        self._keys = np.empty(_FIRST_CAPACITY, np.uint64)
        self._counts = np.zeros(_FIRST_CAPACITY, np.int64)  # 0 where there is no key
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
        """How many different keys there were, about if not `is_exact`."""
        return self._used if self.is_exact else round(_estimate(self._registers))

    def top(self, num_keys: int) -> list[tuple[int, int]]:
        """Returns the most frequent keys with their counts, the most frequent first."""
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
    """Returns where a key is in the table, or belongs."""
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
    """Puts keys that are not there yet into a table with room for them."""
    for i in range(len(new_keys)):
        slot = _find(new_keys[i], mix64(new_keys[i]), keys, counts)
        keys[slot] = new_keys[i]
        counts[slot] = new_counts[i]


@kernel
def _note(hashed: np.uint64, registers: NDArray[np.uint8]) -> None:
    """Enters a key into the HyperLogLog: its first bits choose a register, the zeros after them count."""
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
    """Counts keys until the table is half full; returns where to go on, and how many keys are in it."""
    for i in range(position, len(new_keys)):
        hashed = mix64(new_keys[i])
        slot = _find(new_keys[i], hashed, keys, counts)
        if counts[slot] == 0:
            if 2 * num_used == len(keys):
                return i, num_used
            num_used += 1
            keys[slot] = new_keys[i]
            _note(hashed, registers)
        counts[slot] += 1
    return len(new_keys), num_used


def _estimate(registers: NDArray[np.uint8]) -> float:
    """Returns about how many different keys were noted."""
    num_registers = len(registers)
    of_rank = np.bincount(registers, minlength=_MAX_RANK + 1)
    z = 0.0  # the largest rank, which takes 2^60 keys, is left out
    for rank in range(_MAX_RANK - 1, 0, -1):
        z = 0.5 * (z + of_rank[rank])
    z += num_registers * _sigma(of_rank[0] / num_registers)
    return num_registers**2 / (2 * math.log(2) * z)


def _sigma(x: float) -> float:
    """Returns x + sum over k of x^(2^k) 2^(k - 1), from k = 1; at least one register is not empty: x < 1."""
    total, factor = x, 1.0
    while True:
        x *= x
        before = total
        total += x * factor
        factor *= 2
        if total == before:
            return total
