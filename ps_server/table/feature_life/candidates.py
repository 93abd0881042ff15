"""Candidates: keys without a row that a table counts until they are admitted, exactly or in a Bloom filter.

Exact candidates are rows of dim 0 in regions of their own:

    candidate = | key: 8 bytes | show | click | unseen | last seen |

A counting Bloom filter stores no keys: it takes a fixed amount of memory, and overestimates some keys. Both
are guarded by the locks of their table.

A kernel counts the keys of a push, and gives rows to those that are admitted. Each key is either counted
completely or not at all: a key whose shard has no room is not counted, so a push that is resumed after making
room counts no key twice. A key with a row is no candidate. One call serves all shards of a push.
"""

# ruff: noqa: D102 - what a method does is said once, by `ExactCandidates`

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import kernel, read_only
from ctr_ps.protos.spec import AdmissionSpec, TableSpec
from ctr_ps.ps_server.table.changes import mark_dirty
from ctr_ps.ps_server.table.contents import ShardSource
from ctr_ps.ps_server.table.feature_life.admission import (
    AdmissionRule,
    CountingBloomFilter,
    FilterArrays,
    admission_rule,
    estimate,
    filter_settings,
    is_admitted,
    raise_to,
)
from ctr_ps.ps_server.table.feature_life.removal import (
    CANDIDATE,
    ExpiryRule,
    drop_all,
    evict_rows,
    max_candidates_of_shard,
    shrink_shard,
)
from ctr_ps.ps_server.table.memory.arena import RESERVED_REGION_BYTES
from ctr_ps.ps_server.table.memory.hash_index import (
    BLOCK,
    STATISTICS_WIDTH,
    TableArrays,
    find_block,
    find_row,
    first_slot,
    has_room,
    insert_row,
    shard_of_hash,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int, prefetch
from ctr_ps.ps_server.table.rows.kernels import NewRow, Push, make_row, mark_changed, write_rows
from ctr_ps.ps_server.table.rows.regions import RowRegions, remove_row
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, count_push
from ctr_ps.ps_server.table.table_snapshot import CountersSource, TableSnapshot


@kernel
def _insert(
    table: TableArrays, new_row: NewRow, push: Push, position: Int, hashed: np.uint64
) -> np.int64:
    """Inserts a key's row, and returns the position of its statistics in the flat slab."""
    shard, dim = shard_of_hash(table, hashed), push.grads.shape[1]
    row = make_row(table, new_row, dim, shard, hashed, push.keys[position])
    return np.int64(row * table.slab.shape[1] + table.statistics_column)


@kernel
def _count_exactly(
    table: TableArrays,
    new_row: NewRow,
    candidates: TableArrays,
    rule: AdmissionRule,
    push: Push,
    position: Int,
    hashed: np.uint64,
) -> bool:
    """Counts one key without a row, or inserts its row; False if there is no room: then changes nothing."""
    key, shard = push.keys[position], shard_of_hash(table, hashed)
    counted, width = candidates.slab.reshape(-1), candidates.slab.shape[1]
    occurrences, clicks = push.counts[position, 0], push.counts[position, 1]
    show, click = np.float32(occurrences), np.float32(clicks)
    candidate = find_row(candidates, shard, hashed, key)
    first = candidate * width + candidates.statistics_column
    if candidate >= 0:
        show, click = counted[first + SHOW] + show, counted[first + CLICK] + click
    if is_admitted(rule, key, show, click):
        if not has_room(table, shard):
            return False
        new = _insert(table, new_row, push, position, hashed)
        if candidate >= 0:
            slab = table.slab.reshape(-1)
            for column in range(STATISTICS_WIDTH):
                slab[new + column] = counted[first + column]
            remove_row(candidates, shard, candidate)
        return True
    if candidate < 0:
        if not has_room(candidates, shard):
            return False
        candidate = insert_row(candidates, shard, hashed, key)
        first = candidate * width + candidates.statistics_column
    mark_dirty(candidates, shard, candidate)
    mark_changed(candidates, shard, candidate)
    count_push(counted, counted.view(np.uint32), first, occurrences, clicks, push.now)
    return True


@kernel
def admit_counted(
    table: TableArrays,
    new_row: NewRow,
    candidates: TableArrays,
    rule: AdmissionRule,
    push: Push,
    start: int,
) -> int:
    """Counts a push's keys without a row from key `start` on, and inserts rows for admitted ones.

    A new row takes over its candidate's statistics from before this push; `apply_rows` adds the push's own.
    `candidates` are rows of dim 0 with statistics, in the table's shards. Returns N, or the position of a key
    whose shard has no room in `table` or `candidates`: all keys before it are counted, none after.
    """
    hashes, rows = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    while start < push.keys.size:
        stop = min(start + BLOCK, push.keys.size)
        find_block(table, push.keys, start, stop, hashes, rows)
        for i in range(stop - start):
            if rows[i] < 0:
                shard = shard_of_hash(table, hashes[i])
                prefetch(candidates.slots, first_slot(candidates, shard, hashes[i]))
        for i in range(stop - start):
            if rows[i] < 0 and not _has_row(table, push.keys[start + i], hashes[i]):
                position, hashed = start + i, hashes[i]
                if not _count_exactly(table, new_row, candidates, rule, push, position, hashed):
                    return position
        start = stop
    return start


@kernel
def _has_row(table: TableArrays, key: np.uint64, hashed: np.uint64) -> bool:
    return bool(find_row(table, shard_of_hash(table, hashed), hashed, key) >= 0)


@kernel
def _count_by_filter(
    table: TableArrays,
    new_row: NewRow,
    filter_: FilterArrays,
    rule: AdmissionRule,
    push: Push,
    position: Int,
    hashed: np.uint64,
) -> bool:
    """Same as `_count_exactly`, with the filter's estimate."""
    shard = shard_of_hash(table, hashed)
    before = estimate(filter_, shard, hashed)
    count = min(before + np.int64(push.counts[position, 0]), np.int64(filter_.limit))
    if is_admitted(rule, push.keys[position], np.float32(count), np.float32(0.0)):
        if not has_room(table, shard):
            return False
        new = _insert(table, new_row, push, position, hashed)
        table.slab.reshape(-1)[new + SHOW] = np.float32(before)
    raise_to(filter_, shard, hashed, count)
    return True


@kernel
def admit_estimated(
    table: TableArrays,
    new_row: NewRow,
    filter_: FilterArrays,
    rule: AdmissionRule,
    push: Push,
    start: int,
) -> int:
    """Same as `admit_counted`, with the filter's estimates.

    A new row starts with the estimate before this push as its shows, and no clicks. Its counters are kept.
    """
    hashes, rows = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    while start < push.keys.size:
        stop = min(start + BLOCK, push.keys.size)
        find_block(table, push.keys, start, stop, hashes, rows)
        for i in range(stop - start):
            if rows[i] < 0 and not _has_row(table, push.keys[start + i], hashes[i]):
                position, hashed = start + i, hashes[i]
                if not _count_by_filter(table, new_row, filter_, rule, push, position, hashed):
                    return position
        start = stop
    return start


class ExactCandidates:
    """Candidates as rows, none at first. Not thread-safe: a table locks its shards."""

    def __init__(self, spec: TableSpec, shards: Sequence[int], region_bytes: int) -> None:
        self._shards = shards
        self.regions = RowRegions(
            CANDIDATE, num_shards=spec.num_shards, shards=shards, region_bytes=region_bytes
        )
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        """Keeps counting under another spec, for which `can_count` holds; all shards must be locked."""
        self._spec, self._rule = spec, admission_rule(spec)
        self.regions.limit_rows(max_candidates_of_shard(spec))

    @property
    def num_keys(self) -> int:
        """Number of candidates; 0 for a Bloom filter."""
        return int(self.regions.num_rows.sum())

    @property
    def size_bytes(self) -> int:
        """Bytes of the counts in this process."""
        return self.regions.size_bytes

    @property
    def admission(self) -> tuple[Callable[..., int], TableArrays, AdmissionRule]:
        """The kernel that counts keys, with its counts and rule."""
        return admit_counted, self.regions.arrays, self._rule

    def grow(self, shard: int) -> bool:
        """Makes room for a candidate in one shard; False if there was room. All shards must be locked.

        At the limit it evicts some candidates.
        """
        if self.regions.is_full(shard):
            evict_rows(self.regions, shard, self._spec)
            return True
        return self.regions.grow(shard)

    def shrink(self, shard: int, rule: ExpiryRule) -> int:
        """Ages the counts of a locked shard; removes expired candidates, and returns their number."""
        return shrink_shard(self.regions, shard, 0, rule._replace(max_norm=-1.0)).rows

    def can_count(self, spec: AdmissionSpec) -> bool:
        """Whether these counts fit the kind and size of an admission."""
        return spec.counter == "exact" and not spec.table

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> TableSnapshot:
        """Returns a snapshot of the counts, copied later under `locks`; all shards must be locked."""
        self.regions.begin_snapshot()
        return TableSnapshot(replace(spec, dim=0), self._shards, self.regions, locks)

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the snapshot; all shards must be locked."""
        self.regions.end_snapshot(saved=saved)

    def place(self, shards: Sequence[int]) -> None:
        """The table has `shards` from now on; all shards must be locked."""
        self._shards = shards
        self.regions.place(shards)

    def drop(self, shard: int) -> None:
        """Forgets the candidates of a locked shard."""
        drop_all(self.regions, shard)

    def write(self, keys: Keys, statistics: Values, start: int) -> int:
        """Writes candidates, statistics float32[N, 4], from key `start` on; returns as `write_rows` does."""
        nothing = read_only(np.empty((keys.size, 0), np.float32))
        arrays = self.regions.arrays
        return write_rows(arrays, keys, nothing, nothing, statistics, np.uint64(0), start)


class EstimatedCandidates:
    """Candidates as counters of a Bloom filter, empty at first; see `ExactCandidates`."""

    def __init__(self, spec: TableSpec, admission: AdmissionSpec, shards: Sequence[int]) -> None:
        self._shards = shards
        self._settings = filter_settings(admission)
        self.filter = CountingBloomFilter(self._settings, num_shards=spec.num_shards, shards=shards)
        self.declare(spec)

    def declare(self, spec: TableSpec) -> None:
        self._rule = admission_rule(spec)

    @property
    def num_keys(self) -> int:
        return 0

    @property
    def size_bytes(self) -> int:
        return self.filter.size_bytes

    @property
    def admission(self) -> tuple[Callable[..., int], FilterArrays, AdmissionRule]:
        return admit_estimated, self.filter.arrays, self._rule

    def grow(self, shard: int) -> bool:
        """See `ExactCandidates`; counters never need room."""
        return False

    def shrink(self, shard: int, rule: ExpiryRule) -> int:
        """See `ExactCandidates`; counters have no keys, so they only decay."""
        if not rule.is_dry_run:
            self.filter.decay(shard, float(rule.decay))
        return 0

    def can_count(self, spec: AdmissionSpec) -> bool:
        return spec.counter == "bloom" and filter_settings(spec) == self._settings

    def snapshot(self, spec: TableSpec, locks: Sequence[threading.Lock]) -> CountersSource:
        """See `ExactCandidates`; copies all counters."""
        counters = {shard: self.filter.to_bytes(shard) for shard in self._shards}
        return ShardSource(spec, self._shards, counters.__getitem__)

    def end_snapshot(self, *, saved: bool) -> None:
        """See `ExactCandidates`; no-op, as the snapshot is a copy."""

    def place(self, shards: Sequence[int]) -> None:
        self._shards = shards
        self.filter.place(shards)

    def drop(self, shard: int) -> None:
        self.filter.drop(shard)


Candidates = ExactCandidates | EstimatedCandidates
"""Counts of a table's candidates, of either kind."""


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
