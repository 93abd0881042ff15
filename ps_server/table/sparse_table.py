"""A table of rows, cut into shards.

    key --mix64--> shard --index--> row in the shard's region of the slab

A shard is an index, a region of the slab and a lock. A call takes the locks of all shards that its keys
touch, ascending, and runs one kernel for all of them: a call a shard would cost more than the work.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from protos.errors import GradientError, ProtocolError, SpecConflictError
from protos.gradients import NUM_COUNTS, SparseGrad, Values, require_counts
from protos.keys import Keys
from protos.placement import ONE_SERVER, ShardMap, shard_of
from protos.runtime.jit import read_only
from protos.spec import StatisticsSpec, TableSpec
from protos.store import Missing, Shrunk, TableStatus
from ps_server.optimizers.registry import hyper_of, initial_state
from ps_server.table.changes.subscribers import NOBODY
from ps_server.table.contents import Rows
from ps_server.table.feature_life.candidates import (
    Candidates,
    EstimatedCandidates,
    ExactCandidates,
    candidates_of,
)
from ps_server.table.feature_life.eviction import evict_rows, max_rows_of_shard
from ps_server.table.feature_life.expiry import rule_of, shrink_shard
from ps_server.table.memory.arena import RESERVED_REGION_BYTES
from ps_server.table.memory.hash_index import TableArrays
from ps_server.table.memory.layout import RowLayout
from ps_server.table.rows.initializers import build_initializer
from ps_server.table.rows.kernels import (
    Push,
    apply_rows,
    gather_rows,
    score_rows,
    take_changed_rows,
    write_rows,
)
from ps_server.table.rows.regions import RowRegions
from ps_server.table.rows.statistics import Clock, seconds_of, unknown_statistics, wall_clock
from ps_server.table.spec_checks import check_table_spec
from ps_server.table.table_snapshot import TableSnapshot


class SparseTable:
    """One server's shards of a table. Thread-safe; calls that touch a common shard are serialised."""

    def __init__(
        self,
        spec: TableSpec,
        *,
        server_index: int = 0,
        shard_map: ShardMap = ONE_SERVER,
        num_subscribers: int = 0,
        has_base: bool = False,
        region_bytes: int = RESERVED_REGION_BYTES,
        clock: Clock = wall_clock,
    ) -> None:
        """Makes an empty table.

        Args:
            spec: What the table is.
            server_index: The server that this process is.
            shard_map: Says which shards it has.
            num_subscribers: For how many subscribers to remember which rows changed.
            has_base: Whether each row has a base (replica_table.py).
            region_bytes: Address space to reserve for each shard.
            clock: When rows are seen.

        Raises:
            SpecConflictError: If the spec is impossible.
        """
        self._server_index = server_index
        self._shard_map = shard_map
        self._clock = clock
        self._candidates: Candidates | None = None
        self._region_bytes = region_bytes
        self.shards: Sequence[int] = shard_map.shards_of(server_index, spec.num_shards)
        self._take(spec)
        self._locks = [threading.Lock() for _ in range(spec.num_shards)]
        self._regions = RowRegions(
            RowLayout(spec.dim, self.state_width, spec.statistics is not None, has_base),
            num_shards=spec.num_shards,
            shards=self.shards,
            num_subscribers=num_subscribers,
            region_bytes=region_bytes,
        )
        self._regions.limit_rows(self._max_rows)
        self._expired = np.zeros(spec.num_shards, np.int64)
        self._evicted = np.zeros(spec.num_shards, np.int64)

    def declare(self, spec: TableSpec) -> None:
        """Takes another spec for the same rows, as when a job trains a loaded table on.

        The caller sees to it that the new spec has rows and shards like the old one.

        Raises:
            SpecConflictError: If the spec is impossible.
        """
        with self._locked(range(self.spec.num_shards)):
            if spec.statistics != self.spec.statistics:
                self._regions.tombstones.forget()  # rows age otherwise from here on
            self._take(spec)
            self._regions.limit_rows(self._max_rows)

    def _take(self, spec: TableSpec) -> None:
        """Takes a spec, or leaves all as it was."""
        check_table_spec(spec)
        hyper = hyper_of(spec.optimizer)
        state = initial_state(spec.optimizer, spec.dim)
        initializer = build_initializer(spec.initializer, spec.seed, spec.name)
        self._max_rows = max_rows_of_shard(spec)
        self.spec, self._hyper, self._initial_state = spec, hyper, state
        self._initializer = initializer
        self._candidates = candidates_of(
            spec, self.shards, region_bytes=self._region_bytes, known=self._candidates
        )

    def record_changes(self, num_subscribers: int) -> None:
        """From now on remembers changes for so many subscribers, for whom every row has changed."""
        with self._locked(range(self.spec.num_shards)):
            self._regions.record_changes(num_subscribers)

    @property
    def layout(self) -> RowLayout:
        """Columns of a row."""
        return self._regions.layout

    @property
    def statistics_width(self) -> int:
        """Columns of statistics in a row."""
        return self.layout.statistics_width

    @property
    def state_width(self) -> int:
        """Columns of optimizer state in a row."""
        return self._initial_state.size

    @property
    def status(self) -> TableStatus:
        """Rows, bytes of rows, index and marks of changes, what counts candidates, and what was removed."""
        candidates = self._candidates
        return TableStatus(
            rows=int(self._num_rows.sum()),
            size_bytes=self._regions.size_bytes,
            candidates=candidates.num_keys if candidates else 0,
            candidate_bytes=candidates.size_bytes if candidates else 0,
            expired=int(self._expired.sum()),
            evicted=int(self._evicted.sum()),
        )

    def check(self, grad: SparseGrad) -> None:
        """Raises GradientError or ProtocolError if `push` could not take this gradient."""
        expected = (grad.keys.size, self.spec.dim)
        if grad.keys.size and grad.values.shape != expected:
            raise GradientError(
                f"push to table {self.spec.name!r} has values of shape {grad.values.shape}, "
                f"expected {expected}: one row of dim {self.spec.dim} for each key"
            )
        if grad.values.dtype != np.float32:
            raise GradientError(
                f"push to table {self.spec.name!r} has values of {grad.values.dtype}, expected float32"
            )
        if grad.keys.size and grad.examples < 1:
            raise GradientError(
                f"push to table {self.spec.name!r} has {grad.keys.size} keys but says that it sums "
                f"over {grad.examples} examples"
            )
        require_counts(self.spec.name, grad, keeps_statistics=self.spec.statistics is not None)
        self._count_by_shard(grad.keys)

    def pull(self, keys: Keys, missing: Missing) -> Values:
        """Returns the embeddings of `keys` uint64[N], float32[N, D]; creates nothing.

        A key without a row reads as the table's admission says if there is one, else as `missing` does.

        Raises:
            WrongServerError: If a key belongs to another server.
        """
        out = np.empty((keys.size, self.spec.dim), np.float32)
        reads_initial = self.spec.admission is None and missing is Missing.INITIAL
        default = np.float32(self.spec.default_value)
        with self._locked_for(keys):
            gather_rows(
                self._arrays, self._initializer, read_only(keys), reads_initial, default, out
            )
        return out

    def scores(self, keys: Keys) -> Values:
        """Returns the scores of `keys` uint64[N], float32[N]; 0 for a key without a row.

        The table keeps statistics.
        """
        statistics = self.spec.statistics or StatisticsSpec()
        out = np.empty(keys.size, np.float32)
        with self._locked_for(keys):
            score_rows(
                self._arrays,
                np.float32(statistics.nonclk_coeff),
                np.float32(statistics.click_coeff),
                read_only(keys),
                out,
            )
        return out

    def push(self, grad: SparseGrad, source: int = NOBODY, scores: Values | None = None) -> None:
        """Applies the mean gradient to each key's row, creating rows for missing keys that are admitted.

        Args:
            grad: What to apply; the caller has had `check` accept it.
            source: The subscriber who sent it, for whom the rows do not count as changed.
            scores: float32[N], by which keys are admitted if that is by another table's score.
        """
        if not grad.keys.size:
            return
        keys = read_only(grad.keys)
        push = Push(
            keys=keys,
            grads=read_only(grad.values),
            scale=np.float32(1.0 / grad.examples),
            counts=_NO_COUNTS if grad.counts is None else read_only(grad.counts),
            admitted=self._admitted(keys.size, scores),
            now=seconds_of(self._clock),
            source=source,
        )
        self._with_room(keys, lambda start: self._apply(push, start))

    def _admitted(self, num_keys: int, scores: Values | None) -> NDArray[np.uint8]:
        """Returns which keys get a row when a push is applied: candidates have got theirs by then."""
        if self.spec.admission is None:
            return _ALL_ADMITTED
        if self._candidates is not None or scores is None:
            return read_only(np.zeros(num_keys, np.uint8))
        return read_only((scores >= np.float32(self.spec.admission.threshold)).view(np.uint8))

    def _apply(self, push: Push, start: int) -> int:
        """Applies a push from key `start` as far as there is room; returns as `apply_rows` does."""
        initializer, state = self._initializer, self._initial_state
        if self._candidates is None:
            return apply_rows(self._arrays, initializer, state, self._hyper, push, start)
        stop = self._candidates.admit(self._arrays, initializer, state, push, start)
        counted = push._replace(
            keys=push.keys[:stop],
            grads=push.grads[:stop],
            counts=push.counts[:stop],
            admitted=push.admitted[:stop],
        )
        return apply_rows(self._arrays, initializer, state, self._hyper, counted, start)

    def write(self, rows: Rows) -> None:
        """Writes whole rows of this server's shards, as from a checkpoint.

        Statistics are left out if this table keeps none, and made up if it does and they are missing.
        """
        self._expect_rows(rows.keys)
        keys, weights, state = read_only(rows.keys), read_only(rows.weights), read_only(rows.state)
        statistics = rows.statistics
        if statistics.shape[1] != self.statistics_width:
            now = seconds_of(self._clock)
            statistics = unknown_statistics(keys.size, self.statistics_width, now)
        statistics = read_only(statistics)
        self._with_room(
            keys,
            lambda start: write_rows(self._arrays, keys, weights, state, statistics, start),
        )

    def _expect_rows(self, keys: Keys) -> None:
        """Lets shards without rows have an index for all of these keys at once."""
        counts = self._count_by_shard(keys)
        with self._locked(range(self.spec.num_shards)):
            for shard in np.flatnonzero(counts).tolist():
                self._regions.expect_rows(shard, int(counts[shard]))

    def write_candidates(self, rows: Rows) -> None:
        """Writes keys without a row of this server's shards, as from a checkpoint; the table counts them.

        Raises:
            SpecConflictError: If the table does not count keys one by one.
        """
        candidates = self._candidates
        if not isinstance(candidates, ExactCandidates):
            raise SpecConflictError(f"table {self.spec.name!r} counts no keys one by one")
        keys, statistics = read_only(rows.keys), read_only(rows.statistics)
        self._with_room(keys, lambda start: candidates.write(keys, statistics, start))

    def write_counters(self, shard: int, saved: NDArray[np.uint8]) -> None:
        """Overwrites the counters of a shard, as from a checkpoint of a table with the same admission.

        Raises:
            SpecConflictError: If the table has none.
        """
        candidates = self._candidates
        if not isinstance(candidates, EstimatedCandidates):
            raise SpecConflictError(f"table {self.spec.name!r} has no counters")
        with self._locks[shard]:
            candidates.filter.from_bytes(shard, saved)

    def counts_as(self, spec: TableSpec) -> bool:
        """Whether what a table of this spec counted of keys without a row can be counted on here."""
        candidates, admission = self._candidates, spec.admission
        return candidates is not None and admission is not None and candidates.can_count(admission)

    def take_changed(self, subscriber: int, max_rows: int) -> tuple[Keys, Values]:
        """Returns rows that changed since the subscriber last took them: by a write, or a push of another.

        They no longer count as changed for this subscriber; what changes meanwhile comes again. Each call
        goes on where the last one stopped.

        Args:
            subscriber: One of the `num_subscribers`, from 0.
            max_rows: At most so many rows, at least 1; fewer mean that there were no more.

        Returns:
            Keys uint64[N] and weights float32[N, D].

        Raises:
            ProtocolError: If there is no such subscriber, or `max_rows` is less than 1.
        """
        if not 0 <= subscriber < self._regions.subscribers.num_subscribers:
            raise ProtocolError(
                f"table {self.spec.name!r} remembers changes for {self._regions.subscribers.num_subscribers} "
                f"subscribers, not for subscriber {subscriber}"
            )
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        num_rows = self._num_rows.copy()  # rows that come later wait for the next call
        size = min(max_rows, int(num_rows.sum()))
        keys, weights = np.empty(size, np.uint64), np.empty((size, self.spec.dim), np.float32)
        count = 0
        for shard, start, stop in self._regions.subscribers.stretches(subscriber, num_rows):
            if count == size:
                break
            with self._locks[shard]:
                taken, row = take_changed_rows(
                    self._arrays, shard, start, stop, subscriber, keys[count:], weights[count:]
                )
            count += taken
            self._regions.subscribers.stop_at(subscriber, shard, row)
        return keys[:count], weights[:count]

    def shrink(self, *, max_norm: float | None = None, dry_run: bool = False) -> Shrunk:
        """Ends a pass: ages the rows' statistics, and removes rows that have expired (expiry.py).

        One shard after the other, so that others push and pull meanwhile. A removed key is like one that
        was never pushed. Subscribers are not told: a removed row is no change. Candidates age and expire by
        the same rules.

        Args:
            max_norm: Also removes the rows whose weights have an L2 norm of at most this.
            dry_run: Changes nothing.

        Returns:
            What was removed, or would be.
        """
        now = int(seconds_of(self._clock))
        rule = rule_of(self.spec, now=now, max_norm=max_norm, is_dry_run=dry_run)
        removed = Shrunk()
        for shard in self.shards:
            with self._locks[shard]:
                shrunk = shrink_shard(self._regions, shard, self.spec.dim, rule)
                self._expired[shard] += 0 if dry_run else shrunk.rows
                if self._candidates is not None:
                    removed += Shrunk(candidates=self._candidates.shrink(shard, rule))
            removed += shrunk
        if self.statistics_width and not dry_run:
            self._regions.tombstones.add_pass()
        return removed

    def export_shard(self, shard: int) -> Rows:
        """Returns a copy of one shard's rows, ascending by key."""
        with self._locks[shard]:
            rows = self._regions.rows_of(shard)
            order = np.argsort(self._arrays.keys[rows, 0])
            slab = self._arrays.slab[rows]
            return Rows(
                keys=self._arrays.keys[rows, 0][order],
                weights=slab[order, self.layout.weights],
                state=slab[order, self.layout.state],
                statistics=slab[order, self.layout.statistics],
            )

    def prepare_snapshot(self) -> None:
        """Takes memory that `begin_snapshot` is going to need, while others go on; without is no error."""
        with suppress(MemoryError):  # then that says so
            self._regions.snapshot.prepare(self._num_rows.copy())

    def begin_snapshot(self, *, changes_only: bool = False) -> TableSnapshot:
        """Returns the table as it is now, to be copied while others change it, until `end_snapshot`.

        Rows that change before they are copied are kept beside the table meanwhile.

        Args:
            changes_only: Of the cut only what changed since the last one that was saved.

        Raises:
            ProtocolError: If the last cut has not ended.
            UnknownChangesError: If it is not known what changed.
        """
        with self._locked(range(self.spec.num_shards)):
            if self._regions.snapshot.is_in_snapshot:
                raise ProtocolError(
                    f"table {self.spec.name!r} is being saved: wait until that has ended"
                )
            if changes_only:
                self._regions.tombstones.require_known(self.spec.name)
            candidates = None
            if self._candidates is not None:
                candidates = self._candidates.snapshot(self.spec, self._locks)
            try:
                self._regions.begin_snapshot()
            except MemoryError:
                self._end_snapshot_of_candidates(saved=False)
                raise
            self._regions.tombstones.begin_snapshot()
        return TableSnapshot(
            self.spec,
            self.shards,
            self._regions,
            self._locks,
            candidates,
            changes_only=changes_only,
        )

    def mark_clean(self) -> None:
        """Lets no row count as changed since the last cut: all are as a checkpoint says."""
        with self._locked(range(self.spec.num_shards)):
            self._regions.clear_dirty()
            self._regions.tombstones.restart()

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the cut; unless it was saved, what had changed before it counts as changed again."""
        with self._locked(range(self.spec.num_shards)):
            self._regions.end_snapshot(saved=saved)
            self._regions.tombstones.end_snapshot(saved=saved)
            self._end_snapshot_of_candidates(saved=saved)

    def _end_snapshot_of_candidates(self, *, saved: bool) -> None:
        if self._candidates is not None:
            self._candidates.end_snapshot(saved=saved)

    @property
    def _arrays(self) -> TableArrays:
        return self._regions.arrays

    @property
    def _num_rows(self) -> NDArray[np.int64]:
        return self._regions.num_rows

    def _with_room(self, keys: Keys, kernel: Callable[[int], int]) -> None:
        """Runs a kernel that stops at a key whose shard is full, and lets it go on from there."""
        position = 0
        while True:
            with self._locked_for(keys):
                position = kernel(position)
            if position == keys.size:
                return
            self._make_room(int(shard_of(keys[position], self.spec.num_shards)))

    def _make_room(self, shard: int) -> None:
        """Makes room for a row in one shard, unless another thread just did."""
        with self._locked(range(self.spec.num_shards)):
            if self._candidates is not None and self._candidates.grow(shard):
                return  # that may have been all
            if self._regions.is_full(shard):
                self._evicted[shard] += evict_rows(self._regions, shard, self.spec)
            self._regions.grow(shard)

    def _count_by_shard(self, keys: Keys) -> NDArray[np.int64]:
        return self._shard_map.count_by_shard(
            read_only(keys), self.spec.num_shards, self._server_index
        )

    @contextmanager
    def _locked_for(self, keys: Keys) -> Iterator[None]:
        with self._locked(np.flatnonzero(self._count_by_shard(keys)).tolist()):
            yield

    @contextmanager
    def _locked(self, shards: Sequence[int]) -> Iterator[None]:
        locks = [self._locks[shard] for shard in shards]
        for lock in locks:
            lock.acquire()
        try:
            yield
        finally:
            for lock in locks:
                lock.release()


_NO_COUNTS = read_only(np.empty((0, NUM_COUNTS), np.uint32))
_ALL_ADMITTED = read_only(np.empty(0, np.uint8))
