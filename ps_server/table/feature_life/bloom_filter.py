"""Estimates of how often keys occurred, in a fixed amount of memory: a counting Bloom filter for each shard.

A key has `num_hashes` counters of its shard's `num_counters`; its estimate is the smallest of them, which is
never below the truth. Adding raises only those that are below the new estimate (conservative update: Estan,
Varghese, "New directions in traffic measurement and accounting", SIGCOMM 2002), so keys disturb each other
least. Counters saturate.

Made for n keys and a rate p of keys that never occurred and yet have an estimate above zero:

    num_counters = -n ln p / (ln 2)^2        num_hashes = num_counters / n * ln 2

Bloom, CACM 1970; the hashes: Kirsch, Mitzenmacher, "Less hashing, same performance", ESA 2006.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protos.keys import mix64
from protos.runtime.jit import kernel
from ps_server.table.memory.intrinsics import Int

MAX_COUNTERS = 2**32 - 1
"""Of one shard: a position is scaled from 32 bits of hash."""

MAX_COUNT = 2**16 - 1


def counter_dtype(max_count: int) -> type[np.uint8] | type[np.uint16]:
    """Returns what a counter that reaches `max_count` is kept in."""
    return np.uint8 if max_count <= np.iinfo(np.uint8).max else np.uint16


class FilterArrays(NamedTuple):
    """A filter as kernels see it.

    Attributes:
        counters: uint8 or uint16[num_shards, num_counters].
        num_hashes: Counters of a key.
        limit: The largest count.
    """

    counters: NDArray[Any]
    num_hashes: int
    limit: int


def filter_shape(expected_keys: int, false_positive_rate: float) -> tuple[int, int]:
    """Returns the number of counters, and how many of them a key has."""
    num_counters = -expected_keys * math.log(false_positive_rate) / math.log(2) ** 2
    num_hashes = num_counters / expected_keys * math.log(2)
    return max(1, math.ceil(num_counters)), max(1, round(num_hashes))


@kernel
def _position(filter_: FilterArrays, hashed: np.uint64, i: int) -> np.int64:
    """Returns where the `i`-th counter of a key stands, from the key's hash."""
    # The shard took the high bits of the hash: what is left of it must be spread again.
    bits = mix64(hashed ^ np.uint64(0x9E3779B97F4A7C15))
    step = (bits >> np.uint64(32)) | np.uint64(1)
    place = (bits + np.uint64(i) * step) & np.uint64(0xFFFFFFFF)
    return np.int64((place * np.uint64(filter_.counters.shape[1])) >> np.uint64(32))


@kernel
def estimate(filter_: FilterArrays, shard: Int, hashed: np.uint64) -> np.int64:
    """Returns how often a key of the shard occurred, or more."""
    fewest = np.int64(filter_.limit)
    for i in range(filter_.num_hashes):
        fewest = min(fewest, np.int64(filter_.counters[shard, _position(filter_, hashed, i)]))
    return fewest


@kernel
def raise_to(filter_: FilterArrays, shard: Int, hashed: np.uint64, count: Int) -> None:
    """Makes the estimate of a key at least `count`, which its counters can hold."""
    for i in range(filter_.num_hashes):
        position = _position(filter_, hashed, i)
        filter_.counters[shard, position] = max(filter_.counters[shard, position], count)


@kernel
def _decay(counters: NDArray[Any], decay: float, salt: np.uint64) -> None:
    for i in range(counters.size):
        if counters[i]:
            left = counters[i] * decay
            whole = math.floor(left)
            unit = np.float64(mix64(salt + np.uint64(i)) >> np.uint64(11)) * 2.0**-53
            counters[i] = whole + (unit < left - whole)


class CountingBloomFilter:
    """Counters of a table's shards. Not thread-safe: a table locks its shards.

    Attributes:
        arrays: What kernels work on.
        passes: How often each shard has decayed, by shard.
    """

    def __init__(
        self,
        *,
        expected_keys: int,
        false_positive_rate: float,
        max_count: int,
        num_shards: int,
        shards: Sequence[int],
    ) -> None:
        """Makes a filter in which nothing has occurred.

        Args:
            expected_keys: Of all shards together.
            false_positive_rate: With so many keys.
            max_count: Counters hold at least this; up to `MAX_COUNT`.
            num_shards: Shards of the table.
            shards: Those that have keys here.
        """
        num_counters, num_hashes = filter_shape(
            -(-expected_keys // num_shards), false_positive_rate
        )
        dtype = counter_dtype(max_count)
        # Memory of other servers' shards is never touched, so the system never provides it.
        counters = np.zeros((num_shards, num_counters), dtype)
        self.arrays = FilterArrays(counters, num_hashes, int(np.iinfo(dtype).max))
        self.passes = np.zeros(num_shards, np.int64)
        self._shards = shards

    @property
    def size_bytes(self) -> int:
        """Bytes of this process's counters."""
        counters = self.arrays.counters
        return len(self._shards) * int(counters[0].nbytes)

    def decay(self, shard: int, decay: float) -> None:
        """Lets a pass go by: multiplies the shard's counters.

        A counter between two integers becomes one or the other, so that the mean is kept; which one follows
        from position and number of the pass.
        """
        self.passes[shard] += 1
        salt = np.uint64(mix64(np.uint64(self.passes[shard])))
        _decay(self.arrays.counters[shard], decay, salt)

    def to_bytes(self, shard: int) -> NDArray[np.uint8]:
        """Returns a copy of a shard's passes, 8 bytes, and counters, all little-endian."""
        passes = self.passes[shard : shard + 1].astype("<i8")
        counters = self.arrays.counters[shard]
        little = counters.astype(counters.dtype.newbyteorder("<"))
        return np.concatenate([passes.view(np.uint8), little.view(np.uint8)])

    def from_bytes(self, shard: int, saved: NDArray[np.uint8]) -> None:
        """Overwrites a shard with what `to_bytes` returned of a filter made alike."""
        counters = self.arrays.counters
        self.passes[shard] = saved[:8].view("<i8")[0]
        counters[shard] = saved[8:].view(counters.dtype.newbyteorder("<"))
