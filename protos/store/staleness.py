"""How stale pushes were: a histogram of versions between a pull and the push computed from it.

    bucket    0  1  2  3  4  5   ...  i
    staleness 0  1  2  3- 5- 9-  ...  2 ** (i - 2) + 1  to  2 ** (i - 1)
                       4  8  16

A value of its own: adding and merging return another, so one that was handed out never changes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Counts of batches by staleness. Immutable.

    Attributes:
        counts: Batches in each bucket, without empty ones at the end.
        total: Sum of the staleness over all batches, exact.
        largest: The largest seen, exact.
    """

    counts: tuple[int, ...] = ()
    total: int = 0
    largest: int = 0

    @property
    def batches(self) -> int:
        """Batches counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean over batches; 0 of none."""
        return self.total / self.batches if self.counts else 0.0

    def at_most(self, bounds: Sequence[int]) -> list[int]:
        """Returns how many batches had a staleness of at most each bound; bounds are ends of buckets."""
        counted = [0, *accumulate(self.counts)]
        return [counted[min(_bucket_of(bound), len(self.counts) - 1) + 1] for bound in bounds]

    def add(self, staleness: int, batches: int = 1) -> Self:
        """Returns the histogram with `batches` more of one staleness, which is not negative."""
        if not batches:
            return self
        one = (0,) * _bucket_of(staleness) + (batches,)
        return self.merge(
            type(self)(counts=one, total=staleness * batches, largest=staleness),
        )

    def merge(self, other: Self) -> Self:
        """Returns the histogram of what either has counted."""
        return type(self)(
            counts=tuple(
                mine + theirs
                for mine, theirs in zip_longest(self.counts, other.counts, fillvalue=0)
            ),
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
        )

    def quantile(self, share: float) -> int:
        """Returns a staleness that at least `share` of the batches, from 0 to 1, do not exceed.

        The end of a bucket, so at most twice the exact quantile; 0 of no batches.
        """
        wanted = share * self.batches
        for bucket, counted in enumerate(accumulate(self.counts)):
            if counted and counted >= wanted:
                return min(_end_of(bucket), self.largest)
        return self.largest

    def as_dict(self) -> dict[str, object]:
        """Returns what a log or a report shows; buckets by their range, without empty ones."""
        return {
            "batches": self.batches,
            "mean": self.mean,
            "largest": self.largest,
            "counts": {
                _range_of(bucket): count for bucket, count in enumerate(self.counts) if count
            },
        }


def merge_staleness(parts: Iterable[Staleness]) -> Staleness:
    """Returns the histogram of what any of them has counted."""
    merged = Staleness()
    for part in parts:
        merged = merged.merge(part)
    return merged


def _bucket_of(staleness: int) -> int:
    return (staleness - 1).bit_length() + 1 if staleness else 0


def _end_of(bucket: int) -> int:
    return 1 << (bucket - 1) if bucket else 0


def _range_of(bucket: int) -> str:
    start, end = _end_of(bucket - 1) + 1 if bucket else 0, _end_of(bucket)
    return str(end) if start == end else f"{start}-{end}"
