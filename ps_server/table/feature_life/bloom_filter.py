"""Counting Bloom filter: estimates of how often keys occurred, in a fixed amount of memory for each shard.

A key has `num_hashes` counters of its shard's `num_counters`; its estimate is the smallest of them, which is
never too low. Adding raises only those that are below the new estimate (conservative update: Estan, Varghese,
"New directions in traffic measurement and accounting", SIGCOMM 2002). Counters saturate.

For n keys and a false positive rate p, of keys that never occurred and have an estimate above zero:

    num_counters = -n ln p / (ln 2)^2        num_hashes = num_counters / n * ln 2

Bloom, CACM 1970; the hashes: Kirsch, Mitzenmacher, "Less hashing, same performance", ESA 2006.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.memory.intrinsics import Int

MAX_COUNTERS = 2**32 - 1
"""Most counters of a shard: a position is scaled from 32 bits of hash."""

MAX_COUNT = 2**16 - 1


def counter_dtype(max_count: int) -> type[np.uint8] | type[np.uint16]:
    """Returns the dtype of counters that reach `max_count`."""
    return np.uint8 if max_count <= np.iinfo(np.uint8).max else np.uint16


class FilterArrays(NamedTuple):
    """A filter as kernels see it: `num_hashes` counters for a key, which saturate at `limit`.

    `counters` are uint8 or uint16[num_shards, num_counters].
    """

    counters: NDArray[Any]
    num_hashes: int
    limit: int


def filter_shape(expected_keys: int, false_positive_rate: float) -> tuple[int, int]:
    """Returns the numbers of counters and of hashes (counters of a key)."""
    num_counters = -expected_keys * math.log(false_positive_rate) / math.log(2) ** 2
    num_hashes = num_counters / expected_keys * math.log(2)
    return max(1, math.ceil(num_counters)), max(1, round(num_hashes))


@kernel
def _position(filter_: FilterArrays, hashed: np.uint64, i: int) -> np.int64:
    # All keys of a shard agree in the high bits of the hash, so it is hashed again.
    bits = mix64(hashed ^ np.uint64(0x9E3779B97F4A7C15))
    step = (bits >> np.uint64(32)) | np.uint64(1)
    place = (bits + np.uint64(i) * step) & np.uint64(0xFFFFFFFF)
    return np.int64((place * np.uint64(filter_.counters.shape[1])) >> np.uint64(32))


@kernel
def estimate(filter_: FilterArrays, shard: Int, hashed: np.uint64) -> np.int64:
    """Returns the estimate of how often a key of the shard occurred."""
    fewest = np.int64(filter_.limit)
    for i in range(filter_.num_hashes):
        fewest = min(fewest, np.int64(filter_.counters[shard, _position(filter_, hashed, i)]))
    return fewest


@kernel
def raise_to(filter_: FilterArrays, shard: Int, hashed: np.uint64, count: Int) -> None:
    """Raises the estimate of a key to at least `count`, which must fit its counters."""
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
    """Counters of a table's shards, for `expected_keys` in all of them.

    `passes` int64[num_shards] is how often each shard has decayed; `shards` are those of this server. Not
    thread-safe: a table locks its shards.
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
        num_counters, num_hashes = filter_shape(
            -(-expected_keys // num_shards), false_positive_rate
        )
        dtype = counter_dtype(max_count)
        # Memory of other servers' shards is never touched, so never allocated.
        counters = np.zeros((num_shards, num_counters), dtype)
        self.arrays = FilterArrays(counters, num_hashes, int(np.iinfo(dtype).max))
        self.passes = np.zeros(num_shards, np.int64)
        self._shards = shards

    @property
    def size_bytes(self) -> int:
        """Bytes of this process's counters."""
        counters = self.arrays.counters
        return len(self._shards) * int(counters[0].nbytes)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard that `to_bytes` returns."""
        return 8 + int(self.arrays.counters[0].nbytes)

    def decay(self, shard: int, decay: float) -> None:
        """Multiplies the shard's counters by `decay` at the end of a pass.

        A counter is rounded up or down at random such that its mean is exact; the random number is a hash of
        its position and the number of the pass.
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
        """Overwrites a shard with bytes that `to_bytes` returned from a filter of the same dimensions."""
        counters = self.arrays.counters
        self.passes[shard] = saved[:8].view("<i8")[0]
        counters[shard] = saved[8:].view(counters.dtype.newbyteorder("<"))
