"""Candidates: keys without a row that a table counts until they are admitted, exactly or in a Bloom filter.

Exact candidates are rows of dim 0 in regions of their own:

    candidate = | key: 8 bytes | show | click | unseen | last seen |

A counting Bloom filter stores no keys: it takes a fixed amount of memory, and overestimates some keys. Both
are guarded by the locks of their table.
"""

# ruff: noqa: D102 - what a method does is said once, by `Candidates`

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import read_only
from ctr_ps.protos.spec import AdmissionSpec, TableSpec
from ctr_ps.ps_server.table.feature_life.admission import admission_rule, filter_settings
from ctr_ps.ps_server.table.feature_life.bloom_filter import CountingBloomFilter
from ctr_ps.ps_server.table.feature_life.candidate_kernels import admit_counted, admit_estimated
from ctr_ps.ps_server.table.feature_life.eviction import (
    CANDIDATE,
    evict_rows,
    max_candidates_of_shard,
)
from ctr_ps.ps_server.table.feature_life.expiry import ExpiryRule, shrink_shard
from ctr_ps.ps_server.table.memory.arena import RESERVED_REGION_BYTES
from ctr_ps.ps_server.table.memory.hash_index import TableArrays
from ctr_ps.ps_server.table.rows.initializers import Initializer
from ctr_ps.ps_server.table.rows.kernels import Push, write_rows
from ctr_ps.ps_server.table.rows.regions import RowRegions
from ctr_ps.ps_server.table.table_snapshot import CountersSnapshot, TableSnapshot


class Candidates(Protocol):
    """Counts of a table's candidates. Not thread-safe: a table locks its shards."""

    def declare(self, spec: TableSpec) -> None:
        """Keeps counting under another spec, for which `can_count` holds; all shards must be locked."""

    @property
    def num_keys(self) -> int:
        """Number of candidates; 0 for a Bloom filter."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the counts in this process."""

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        """Counts keys, and inserts rows for admitted ones; see `admit_counted`."""

    def grow(self, shard: int) -> bool:
        """Makes room for a candidate in one shard; False if there was room. All shards must be locked."""

    def shrink(self, shard: int, rule: ExpiryRule) -> int:
        """Ages the counts of a locked shard and removes expired candidates.

        Returns their number, in a dry run too.
        """

    def can_count(self, spec: AdmissionSpec) -> bool:
        """Whether these counts fit the kind and size of an admission."""

    def snapshot(
        self, spec: TableSpec, locks: Sequence[threading.Lock]
    ) -> TableSnapshot | CountersSnapshot:
        """Returns a snapshot of the counts, copied later under `locks`; all shards must be locked."""

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the snapshot; all shards must be locked."""


class ExactCandidates:
    """Candidates as rows, none at first: see `Candidates`."""

    def __init__(self, spec: TableSpec, shards: Sequence[int], region_bytes: int) -> None:
        self._shards = shards
        self.regions = RowRegions(
            CANDIDATE, num_shards=spec.num_shards, shards=shards, region_bytes=region_bytes
        )
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        self._spec, self._rule = spec, admission_rule(spec)
        self.regions.limit_rows(max_candidates_of_shard(spec))

    @property
    def num_keys(self) -> int:
        return int(self.regions.num_rows.sum())

    @property
    def size_bytes(self) -> int:
        return self.regions.size_bytes

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        candidates = self.regions.arrays
        return admit_counted(table, initializer, initial_state, candidates, self._rule, push, start)

    def grow(self, shard: int) -> bool:
        """See `Candidates`; at the limit, evicts some candidates."""
        if self.regions.is_full(shard):
            evict_rows(self.regions, shard, self._spec)
            return True
        return self.regions.grow(shard)

    def shrink(self, shard: int, rule: ExpiryRule) -> int:
        return shrink_shard(self.regions, shard, 0, rule._replace(max_norm=-1.0)).rows

    def can_count(self, spec: AdmissionSpec) -> bool:
        return spec.counter == "exact" and not spec.table

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> TableSnapshot:
        self.regions.begin_snapshot()
        return TableSnapshot(replace(spec, dim=0), self._shards, self.regions, locks)

    def end_snapshot(self, *, saved: bool) -> None:
        self.regions.end_snapshot(saved=saved)

    def write(self, keys: Keys, statistics: Values, start: int) -> int:
        """Writes candidates from key `start` on, as from a checkpoint; returns the same as `write_rows`.

        `keys` are uint64[N], `statistics` float32[N, 4].
        """
        nothing = read_only(np.empty((keys.size, 0), np.float32))
        return write_rows(self.regions.arrays, keys, nothing, nothing, statistics, start)


class EstimatedCandidates:
    """Candidates as counters of a Bloom filter, empty at first: see `Candidates`."""

    def __init__(self, spec: TableSpec, admission: AdmissionSpec, shards: Sequence[int]) -> None:
        self._shards = shards
        self._settings = filter_settings(admission)
        self.filter = CountingBloomFilter(
            **self._settings._asdict(), num_shards=spec.num_shards, shards=shards
        )
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        self._rule = admission_rule(spec)

    @property
    def num_keys(self) -> int:
        return 0

    @property
    def size_bytes(self) -> int:
        return self.filter.size_bytes

    def admit(
        self,
        table: TableArrays,
        initializer: Initializer,
        initial_state: Values,
        push: Push,
        start: int,
    ) -> int:
        counters = self.filter.arrays
        return admit_estimated(table, initializer, initial_state, counters, self._rule, push, start)

    def grow(self, shard: int) -> bool:
        """See `Candidates`; counters never need room."""
        return False

    def shrink(self, shard: int, rule: ExpiryRule) -> int:
        """See `Candidates`; counters have no keys, so they only decay."""
        if not rule.is_dry_run:
            self.filter.decay(shard, float(rule.decay))
        return 0

    def can_count(self, spec: AdmissionSpec) -> bool:
        return spec.counter == "bloom" and filter_settings(spec) == self._settings

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> CountersSnapshot:
        """See `Candidates`; copies all counters."""
        counters = {shard: self.filter.to_bytes(shard) for shard in self._shards}
        return CountersSnapshot(spec, self._shards, counters)

    def end_snapshot(self, *, saved: bool) -> None:
        """See `Candidates`; no-op, as the snapshot is a copy."""


def candidates_of(
    spec: TableSpec,
    shards: Sequence[int],
    *,
    region_bytes: int = RESERVED_REGION_BYTES,
    known: Candidates | None = None,
) -> Candidates | None:
    """Returns the candidates of a table; None if every key is admitted, or another table's score decides.

    `known` are those under an earlier spec of the table, kept if they can count for this one.
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
