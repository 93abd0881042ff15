"""Keys that a table knows without having a row for them, and how it counts them.

Exact candidates are rows of dim 0 in regions of their own:

    candidate = | key: 8 bytes | show | click | unseen | last seen |

A counting Bloom filter knows no keys: it takes the same memory however many there are, and tells more than
the truth of some. Both are under the locks of their table.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from protos.gradients import Values
from protos.keys import Keys
from protos.runtime.jit import read_only
from protos.spec import AdmissionSpec, TableSpec
from ps_server.table.feature_life.admission import filter_settings, rule_of
from ps_server.table.feature_life.bloom_filter import CountingBloomFilter
from ps_server.table.feature_life.candidate_kernels import admit_counted, admit_estimated
from ps_server.table.feature_life.eviction import CANDIDATE, evict_rows, max_candidates_of_shard
from ps_server.table.feature_life.expiry import Rule as Shrinking
from ps_server.table.feature_life.expiry import shrink_shard
from ps_server.table.memory.arena import RESERVED_REGION_BYTES
from ps_server.table.memory.hash_index import TableArrays
from ps_server.table.rows.initializers import Initializer
from ps_server.table.rows.kernels import Push, write_rows
from ps_server.table.rows.regions import RowRegions
from ps_server.table.table_snapshot import CountersSnapshot, TableSnapshot


class Candidates(Protocol):
    """Counts of keys without a row. Not thread-safe: a table locks its shards."""

    def declare(self, spec: TableSpec) -> None:
        """Goes on counting for another spec of the table, for which `can_count`; all shards are locked."""

    @property
    def num_keys(self) -> int:
        """Keys that are known; 0 where there are only counters."""

    @property
    def size_bytes(self) -> int:
        """Bytes of this process's counts."""

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        """Counts keys, and gives rows to those that are admitted; see `admit_counted`."""

    def grow(self, shard: int) -> bool:
        """Makes room for a candidate in one shard; False if there was. All shards must be locked."""

    def shrink(self, shard: int, shrinking: Shrinking) -> int:
        """Ages the counts of a shard, which must be locked, and forgets keys by its table's rules.

        Returns:
            How many keys it forgets, or would in a dry run.
        """

    def can_count(self, spec: AdmissionSpec) -> bool:
        """Whether the counts are such as this admission wants."""

    def snapshot(
        self, spec: TableSpec, locks: Sequence[threading.Lock]
    ) -> TableSnapshot | CountersSnapshot:
        """Returns the counts as they are now, for a checkpoint; all shards must be locked.

        Args:
            spec: Of the table.
            locks: Of its shards, for who copies later.
        """

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the cut; all shards must be locked."""


class ExactCandidates:
    """Candidates as rows: see `Candidates`."""

    def __init__(self, spec: TableSpec, shards: Sequence[int], region_bytes: int) -> None:
        """Makes an empty set of candidates for some of a table's shards."""
        self._shards = shards
        self.regions = RowRegions(
            CANDIDATE, num_shards=spec.num_shards, shards=shards, region_bytes=region_bytes
        )
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        """See `Candidates`."""
        self._spec, self._rule = spec, rule_of(spec)
        self.regions.limit_rows(max_candidates_of_shard(spec))

    @property
    def num_keys(self) -> int:
        """See `Candidates`."""
        return int(self.regions.num_rows.sum())

    @property
    def size_bytes(self) -> int:
        """See `Candidates`."""
        return self.regions.size_bytes

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        """See `Candidates`."""
        candidates = self.regions.arrays
        return admit_counted(table, initializer, initial_state, candidates, self._rule, push, start)

    def grow(self, shard: int) -> bool:
        """See `Candidates`; where they are as many as they may be, some are forgotten."""
        if self.regions.is_full(shard):
            evict_rows(self.regions, shard, self._spec)
            return True
        return self.regions.grow(shard)

    def shrink(self, shard: int, shrinking: Shrinking) -> int:
        """See `Candidates`."""
        return shrink_shard(self.regions, shard, 0, shrinking._replace(max_norm=-1.0)).rows

    def can_count(self, spec: AdmissionSpec) -> bool:
        """See `Candidates`."""
        return spec.counter == "exact" and not spec.table

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> TableSnapshot:
        """See `Candidates`."""
        self.regions.begin_snapshot()
        return TableSnapshot(replace(spec, dim=0), self._shards, self.regions, locks)

    def end_snapshot(self, *, saved: bool) -> None:
        """See `Candidates`."""
        self.regions.end_snapshot(saved=saved)

    def write(self, keys: Keys, statistics: Values, start: int) -> int:
        """Writes candidates from key `start` on, as from a checkpoint; returns as `write_rows` does.

        Args:
            keys: uint64[N].
            statistics: float32[N, 4].
            start: First key.
        """
        nothing = read_only(np.empty((keys.size, 0), np.float32))
        return write_rows(self.regions.arrays, keys, nothing, nothing, statistics, start)


class EstimatedCandidates:
    """Candidates as counters of a Bloom filter: see `Candidates`."""

    def __init__(self, spec: TableSpec, admission: AdmissionSpec, shards: Sequence[int]) -> None:
        """Makes a filter for some of a table's shards in which nothing has occurred."""
        self._shards = shards
        self._settings = filter_settings(admission)
        self.filter = CountingBloomFilter(
            expected_keys=self._settings.expected_keys,
            false_positive_rate=self._settings.false_positive_rate,
            max_count=self._settings.max_count,
            num_shards=spec.num_shards,
            shards=shards,
        )
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        """See `Candidates`."""
        self._rule = rule_of(spec)

    @property
    def num_keys(self) -> int:
        """See `Candidates`."""
        return 0

    @property
    def size_bytes(self) -> int:
        """See `Candidates`."""
        return self.filter.size_bytes

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        """See `Candidates`."""
        counters = self.filter.arrays
        return admit_estimated(table, initializer, initial_state, counters, self._rule, push, start)

    def grow(self, shard: int) -> bool:
        """See `Candidates`; counters never need room."""
        return False

    def shrink(self, shard: int, shrinking: Shrinking) -> int:
        """See `Candidates`; counters know no keys, so they only decay."""
        if not shrinking.is_dry_run:
            self.filter.decay(shard, float(shrinking.decay))
        return 0

    def can_count(self, spec: AdmissionSpec) -> bool:
        """See `Candidates`."""
        return spec.counter == "bloom" and filter_settings(spec) == self._settings

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> CountersSnapshot:
        """See `Candidates`; copies all counters."""
        counters = {shard: self.filter.to_bytes(shard) for shard in self._shards}
        return CountersSnapshot(spec, self._shards, counters)

    def end_snapshot(self, *, saved: bool) -> None:
        """See `Candidates`; the copy needs nothing of the counters."""


def candidates_of(
    spec: TableSpec,
    shards: Sequence[int],
    *,
    region_bytes: int = RESERVED_REGION_BYTES,
    known: Candidates | None = None,
) -> Candidates | None:
    """Returns the candidates of a table.

    Args:
        spec: Of the table.
        shards: Which of its shards are here.
        region_bytes: Address space to reserve for each shard of them.
        known: Candidates under an earlier spec of the same table; kept where they count what this one wants.

    Returns:
        None if every key is admitted, or another table's score decides.
    """
    admission = spec.admission
    if admission is None or admission.table:
        return None
    if known is not None and known.can_count(admission):
        known.declare(spec)
        return known
    if admission.counter == "bloom":
        return EstimatedCandidates(spec, admission, shards)
    return ExactCandidates(spec, shards, region_bytes)
