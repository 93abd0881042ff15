"""Statistics of dense columns, in one pass and bounded memory.

Counts, extremes, means and deviations are exact. Percentiles are exact up to `MAX_SAMPLE` rows, then those of
a uniform sample of `MAX_SAMPLE` rows: the rows with the smallest hashes, independent of the division into
blocks. The share of a column below a percentile of the sample has the standard error sqrt(p (1 - p) / n), n
the sampled rows in which the number is not missing: 0.06 % for the 95th percentile of 131,072.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ps_worker.data.negative_sampling import write_row_hashes

MAX_SAMPLE = 1 << 17

_SEED = 95

Floats = NDArray[np.float64]


class Moments:
    """Means and deviations of columns; blocks are merged as in Chan, Golub and LeVeque, 1979.

    Attributes:
        counts: int64[C], numbers that are not missing.
        means: float64[C], 0 without numbers.
    """

    def __init__(self, num_columns: int) -> None:
        self.counts = np.zeros(num_columns, np.int64)
        self.means = np.zeros(num_columns)
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
    """Statistics of dense columns. For one thread.

    Attributes:
        rows: Number of rows so far.
        minima: float64[C], inf where all are missing.
        maxima: float64[C], -inf where all are missing.
        moments: Of the numbers x.
        log_moments: Of sign(x) log(1 + |x|).
    """

    def __init__(self, num_columns: int) -> None:
        self.rows = 0
        self.minima = np.full(num_columns, np.inf)
        self.maxima = np.full(num_columns, -np.inf)
        self.moments = Moments(num_columns)
        self.log_moments = Moments(num_columns)
        self._sample = np.empty(
            (2 * MAX_SAMPLE, num_columns)
        )  # the first `_sampled` rows are valid
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
        """Returns percentiles of a column, without interpolation.

        Args:
            column: From 0; must have a number.
            shares: float64[n], in [0, 1]; 0 and 1 give the exact extremes.

        Returns:
            float64[n], the smallest numbers that at least these shares of the column do not exceed.
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
