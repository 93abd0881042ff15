"""Statistics of columns, in one pass and bounded memory: of numbers, and of the keys of slots.

Numbers: counts, extremes, means and deviations are exact. Percentiles are exact up to `MAX_SAMPLE` rows, then
those of a uniform sample of `MAX_SAMPLE` rows: the rows with the smallest hashes, independent of the division
into blocks. The share of a column below a percentile of the sample has the standard error
sqrt(p (1 - p) / n), n the sampled rows in which the number is not missing: 0.06 % for the 95th percentile of
131,072.

Keys: counts are exact up to `MAX_EXACT` distinct keys. Beyond that:

- A number is subtracted from all counts, so that at most half of `MAX_EXACT` keys are left (Misra and Gries,
  "Finding repeated elements", 1982, with many decrements at once). Counts are then too small by at most the
  sum of these numbers, which is known. (For n keys it is at most 2 n / MAX_EXACT, since each is subtracted
  from more than MAX_EXACT / 2 keys.)
- The number of distinct keys is that of a HyperLogLog with 2^14 registers (standard error 0.81 %), with the
  estimator of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017, algorithm 6,
  which needs no correction table.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import mix64
from ctr_ps.ps_worker.data.negative_sampling import write_row_hashes

MAX_SAMPLE = 1 << 17
MAX_EXACT = 1 << 16

_PENDING_KEYS = 1 << 18
_SEED = 95
_INDEX_BITS = 14
_NUM_REGISTERS = 1 << _INDEX_BITS
_RANK_BITS = 64 - _INDEX_BITS
_MAX_RANK = _RANK_BITS + 1
_mix: Any = mix64  # of arrays, too

Floats = NDArray[np.float64]


class Moments:
    """Means and deviations of columns; blocks are merged as in Chan, Golub and LeVeque, 1979."""

    def __init__(self, num_columns: int) -> None:
        self.counts = np.zeros(num_columns, np.int64)  # int64[C], numbers that are not missing
        self.means = np.zeros(num_columns)  # float64[C], 0 without numbers
        self._squares = np.zeros(num_columns)  # sums of squared distances from the mean

    @property
    def deviations(self) -> Floats:
        """Population standard deviations, float64[C]; 0 without numbers."""
        return np.sqrt(self._squares / np.maximum(self.counts, 1))

    def add(self, values: Floats) -> None:
        """Adds rows float64[N, C], nan where missing."""
        is_there = ~np.isnan(values)
        counts = is_there.sum(axis=0)
        means = np.sum(values, axis=0, where=is_there) / np.maximum(counts, 1)
        squares = np.sum((values - means) ** 2, axis=0, where=is_there)
        totals = np.maximum(self.counts + counts, 1)
        distances = np.where(counts > 0, means - self.means, 0.0)
        self._squares += squares + distances**2 * self.counts * counts / totals
        self.means += distances * counts / totals
        self.counts += counts


class NumberStats:
    """Statistics of dense columns: of the numbers x, and of sign(x) log(1 + |x|). For one thread.

    Extremes of a column are inf and -inf where all numbers are missing.
    """

    def __init__(self, num_columns: int) -> None:
        self.rows = 0
        self.minima = np.full(num_columns, np.inf)
        self.maxima = np.full(num_columns, -np.inf)
        self.moments = Moments(num_columns)
        self.log_moments = Moments(num_columns)
        self._sample = np.empty((2 * MAX_SAMPLE, num_columns))  # `_sampled` rows are valid
        self._hashes = np.empty(2 * MAX_SAMPLE, np.uint64)
        self._sampled = 0
        self._largest = np.uint64(2**64 - 1)  # hash of a row in the sample

    def add(self, values: Floats) -> None:
        """Adds rows float64[N, C], nan where missing."""
        is_missing = np.isnan(values)
        self.minima = np.minimum(
            self.minima, np.where(is_missing, np.inf, values).min(axis=0, initial=np.inf)
        )
        self.maxima = np.maximum(
            self.maxima, np.where(is_missing, -np.inf, values).max(axis=0, initial=-np.inf)
        )
        self.moments.add(values)
        self.log_moments.add(np.copysign(np.log1p(np.abs(values)), values))
        for start in range(0, len(values), MAX_SAMPLE):
            self._add_to_sample(values[start : start + MAX_SAMPLE])

    def percentiles(self, column: int, shares: Floats) -> Floats:
        """Returns the smallest numbers that at least these shares float64[n] of a column do not exceed.

        The column must have a number; 0 and 1 give its exact extremes.
        """
        if self._sampled > MAX_SAMPLE:
            self._trim_sample()
        values = self._sample[: self._sampled, column]
        present = values[~np.isnan(values)]
        if len(present) == 0:  # all sampled rows lack the number
            present = np.array([self.minima[column], self.maxima[column]])
        found = np.quantile(present, shares, method="inverted_cdf")
        found[shares == 0.0] = self.minima[column]
        found[shares == 1.0] = self.maxima[column]
        return found

    @property
    def is_exact(self) -> bool:
        """Whether percentiles are exact."""
        return self.rows <= MAX_SAMPLE

    def _add_to_sample(self, values: Floats) -> None:
        hashes = np.empty(len(values), np.uint64)
        write_row_hashes(_SEED, self.rows, hashes)
        self.rows += len(values)
        is_drawn = hashes <= self._largest
        if self._sampled + is_drawn.sum() > len(self._hashes):
            self._trim_sample()
        stop = self._sampled + int(is_drawn.sum())
        self._sample[self._sampled : stop] = values[is_drawn]
        self._hashes[self._sampled : stop] = hashes[is_drawn]
        self._sampled = stop

    def _trim_sample(self) -> None:
        """Keeps the rows with the smallest hashes."""
        order = np.argpartition(self._hashes[: self._sampled], MAX_SAMPLE - 1)[:MAX_SAMPLE]
        self._sample[:MAX_SAMPLE] = self._sample[order]
        self._hashes[:MAX_SAMPLE] = self._hashes[order]
        self._sampled = MAX_SAMPLE
        self._largest = self._hashes[:MAX_SAMPLE].max()


class ValueCounts:
    """Counts of uint64 keys. For one thread."""

    def __init__(self) -> None:
        self._undercount = 0
        self._keys = np.empty(0, np.uint64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[NDArray[np.uint64]] = []
        self._registers = np.zeros(_NUM_REGISTERS, np.uint8)

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Counts keys, uint64[n]."""
        self._pending.append(keys)
        if sum(map(len, self._pending)) >= _PENDING_KEYS:
            self._merge()

    @property
    def undercount(self) -> int:
        """The largest error of the counts of `top`, which may be too small; 0 while exact."""
        self._merge()
        return self._undercount

    @property
    def is_exact(self) -> bool:
        """Whether `num_distinct` and the counts are exact."""
        return self.undercount == 0

    @property
    def num_distinct(self) -> int:
        """Number of distinct keys, estimated unless `is_exact`."""
        return len(self._keys) if self.is_exact else round(_estimate(self._registers))

    def top(self, num_keys: int) -> list[tuple[int, int]]:
        """Returns the most frequent keys and their counts, in descending order."""
        self._merge()
        order = np.lexsort((self._keys, -self._counts))[:num_keys]
        return [(int(self._keys[i]), int(self._counts[i])) for i in order]

    def _merge(self) -> None:
        if not self._pending:
            return
        new_keys, new_counts = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending = []
        self._add_to_sketch(new_keys)
        both = np.concatenate([self._keys, new_keys])
        self._keys, places = np.unique(both, return_inverse=True)
        sums = np.bincount(places, np.concatenate([self._counts, new_counts]))  # exact below 2^53
        self._counts = sums.astype(np.int64)
        if len(self._keys) > MAX_EXACT:
            place = len(self._keys) - MAX_EXACT // 2 - 1
            subtracted = int(np.partition(self._counts, place)[place])
            self._undercount += subtracted
            is_left = self._counts > subtracted
            self._keys, self._counts = self._keys[is_left], self._counts[is_left] - subtracted

    def _add_to_sketch(self, keys: NDArray[np.uint64]) -> None:
        """The first bits of a hash choose a register, the rank is 1 + the zeros at the head of the others."""
        hashes = _mix(keys)
        registers = (hashes >> np.uint64(_RANK_BITS)).astype(np.intp)
        others = hashes & np.uint64((1 << _RANK_BITS) - 1)
        _, num_bits = np.frexp(others.astype(np.float64))  # exact below 2^53
        np.maximum.at(self._registers, registers, (_MAX_RANK - num_bits).astype(np.uint8))


def _estimate(registers: NDArray[np.uint8]) -> float:
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
