"""Sparse table: rows by key, in shards.

    key --mix64--> shard --memory/hash_index.py--> row in the shard's region of the slab

A shard is an index, a region of the slab and a lock. A call takes the locks of all shards of its keys, in
ascending order, and runs one kernel (rows/kernels.py) for all of them: a kernel call for each shard would
cost more than the work.
"""

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import CheckpointError, GradientError, ProtocolError, SpecError
from ctr_ps.protos.gradients import NUM_COUNTS, SparseGrad, Values, require_counts, require_examples
from ctr_ps.protos.keys import Keys, require_unique
from ctr_ps.protos.placement import ANY_SERVER, ONE_SERVER, ShardMap, shard_of
from ctr_ps.protos.runtime.jit import read_only
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import Missing, Shrunk, TableStatus
from ctr_ps.ps_server.optimizers.registry import Tuning, initial_state
from ctr_ps.ps_server.table.changes import NOBODY
from ctr_ps.ps_server.table.contents import Rows, joined_rows
from ctr_ps.ps_server.table.feature_life.admission import PASSES_BYTES
from ctr_ps.ps_server.table.feature_life.candidates import (
    Candidates,
    EstimatedCandidates,
    ExactCandidates,
    candidates_of,
)
from ctr_ps.ps_server.table.feature_life.removal import (
    drop_all,
    evict_rows,
    expiry_rule,
    max_rows_of_shard,
    shrink_shard,
)
from ctr_ps.ps_server.table.memory.arena import region_bytes_of_table
from ctr_ps.ps_server.table.memory.hash_index import STATISTICS_WIDTH, TableArrays
from ctr_ps.ps_server.table.rows.initializers import build_initializer
from ctr_ps.ps_server.table.rows.kernels import (
    NewRow,
    Push,
    apply_rows,
    find_new_row,
    gather_rows,
    gather_states,
    score_rows,
    take_changed_rows,
    write_rows,
)
from ctr_ps.ps_server.table.rows.regions import RowRegions, layout_of, remove_keys
from ctr_ps.ps_server.table.rows.statistics import (
    Clock,
    coefficients_of,
    seconds_of,
    unknown_statistics,
    wall_clock,
)
from ctr_ps.ps_server.table.spec_checks import check_table_spec
from ctr_ps.ps_server.table.table_snapshot import TableSnapshot


class SparseTable:
    """One server's shards of a table, empty at first. Thread-safe; calls on a common shard are serialised.

    Changes are recorded for `num_subscribers`; with `has_base` each row has a base (replica_table.py). Raises
    SpecError if the spec is invalid.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        server_index: int = 0,
        shard_map: ShardMap = ONE_SERVER,
        num_subscribers: int = 0,
        has_base: bool = False,
        region_bytes: int | None = None,
        clock: Clock = wall_clock,
    ) -> None:
        self._server_index = server_index
        self._shard_map = shard_map
        self._clock = clock
        self._candidates: Candidates | None = None
        self._region_bytes = region_bytes or region_bytes_of_table(spec.num_shards)
        self.shards: Sequence[int] = shard_map.shards_of(server_index, spec.num_shards)
        self._set_spec(spec)
        self._locks = [threading.Lock() for _ in range(spec.num_shards)]
        self._accesses = np.zeros(spec.num_shards, np.int64)
        self._regions = RowRegions(
            layout_of(spec, has_base=has_base),
            num_shards=spec.num_shards,
            shards=self.shards,
            num_subscribers=num_subscribers,
            region_bytes=self._region_bytes,
        )
        self._regions.limit_rows(self._max_rows)
        self._expired = np.zeros(spec.num_shards, np.int64)
        self._evicted = np.zeros(spec.num_shards, np.int64)

    def declare(self, spec: TableSpec) -> None:
        """Changes the spec but keeps the rows, of the same layout and shards; raises SpecError if invalid."""
        with self._locked(range(self.spec.num_shards)):
            if spec.statistics != self.spec.statistics:
                self._regions.tombstones.forget()  # rows age by other rules now
            known = self._moved_regions
            self._set_spec(spec)
            self._regions.limit_rows(self._max_rows)
            for regions in self._moved_regions[len(known) :]:  # counted exactly from now on
                regions.begin_move([*self._regions.moving])

    def _set_spec(self, spec: TableSpec) -> None:
        """Sets the spec and what it implies; if it is invalid, changes nothing."""
        check_table_spec(spec)
        tuning = Tuning(spec.optimizer)
        state = initial_state(spec.optimizer, spec.dim)
        initializer = build_initializer(
            spec.initializer, spec.seed, spec.name, is_bfloat16=spec.is_bfloat16
        )
        self._max_rows = max_rows_of_shard(spec)
        self.spec, self._tuning, self._new_row = spec, tuning, NewRow(initializer, state)
        self._candidates = candidates_of(
            spec, self.shards, region_bytes=self._region_bytes, known=self._candidates
        )

    def record_changes(self, num_subscribers: int) -> None:
        """Records changes for subscribers from now on; initially every row counts as changed."""
        with self._locked(range(self.spec.num_shards)):
            self._regions.record_changes(num_subscribers)

    @property
    def state_width(self) -> int:
        """Columns of optimizer state in a row."""
        return self._new_row.state.size

    @property
    def status(self) -> TableStatus:
        """Numbers of rows, candidates and removed rows, and their memory in bytes."""
        candidates, rows = self._candidates, self._num_rows[self.shards]
        return TableStatus(
            rows=int(rows.sum()),
            size_bytes=self._regions.size_bytes,
            candidates=candidates.num_keys if candidates else 0,
            candidate_bytes=candidates.size_bytes if candidates else 0,
            expired=int(self._expired.sum()),
            evicted=int(self._evicted.sum()),
            shards=len(self.shards),
            smallest_shard=int(rows.min()) if rows.size else 0,
            largest_shard=int(rows.max(initial=0)),
            index_slots=self._regions.index_slots,
        )

    def check(self, grad: SparseGrad) -> None:
        """Raises GradientError, ProtocolError or WrongServerError if `push` cannot apply a gradient."""
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
        if grad.keys.size:
            require_examples(f"table {self.spec.name!r}", grad.examples)
        require_counts(self.spec.name, grad, keeps_statistics=self.spec.statistics is not None)
        self._accesses += self._count_by_shard(grad.keys)
        require_unique(f"push to table {self.spec.name!r}", grad.keys, GradientError)

    @property
    def new_row_bytes(self) -> int:
        """Most bytes that a new row takes, with its share of the index."""
        return self._regions.new_row_bytes

    def key_of_new_row(self, keys: Keys) -> int | None:
        """Returns one of `keys` uint64[N] for which a push may create a row, or None; see `find_new_row`."""
        with self._locked_for(keys):
            position = find_new_row(self._arrays, read_only(keys))
        return None if position == keys.size else int(keys[position])

    def pull(self, keys: Keys, missing: Missing) -> Values:
        """Returns the embeddings of `keys` uint64[N], float32[N, D]; creates no rows.

        A key without a row reads as the admission's default value, or without admission as `missing` says.
        WrongServerError if a key belongs to another server.
        """
        out = np.empty((keys.size, self.spec.dim), np.float32)
        reads_initial = self.spec.admission is None and missing is Missing.INITIAL
        default = np.float32(self.spec.default_value)
        with self._locked_for(keys) as counts:
            self._accesses += counts
            initializer = self._new_row.initializer
            gather_rows(self._arrays, initializer, read_only(keys), reads_initial, default, out)
        return out

    def pull_states(self, keys: Keys) -> tuple[Values, Values]:
        """Returns whole rows of `keys` uint64[N]: weights float32[N, D] and state float32[N, K].

        A key without a row reads as a new row would be; none is created. WrongServerError as in `pull`.
        """
        weights = np.empty((keys.size, self.spec.dim), np.float32)
        state = np.empty((keys.size, self.state_width), np.float32)
        with self._locked_for(keys):
            gather_states(self._arrays, self._new_row, read_only(keys), weights, state)
        return weights, state

    def require_own(self, keys: Keys) -> None:
        """Raises WrongServerError if one of `keys` uint64[N] belongs to another server."""
        self._count_by_shard(keys)

    def own(self, keys: Keys) -> NDArray[np.int32]:
        """Returns the positions in `keys` uint64[N] of those that belong to this server, ascending."""
        routed = self._shard_map.route(keys, self.spec.num_shards)
        return routed[self._server_index] if self.shards else np.empty(0, np.int32)

    def scores(self, keys: Keys) -> Values:
        """Returns the scores of `keys`, float32[N], 0 without a row; the table must keep statistics."""
        coefficients = coefficients_of(self.spec.statistics)
        out = np.empty(keys.size, np.float32)
        with self._locked_for(keys):
            score_rows(self._arrays, coefficients, read_only(keys), out)
        return out

    def push(
        self,
        grad: SparseGrad,
        source: int = NOBODY,
        scores: Values | None = None,
        *,
        step: int = 0,
        draw: int = 0,
        staleness: int = 0,
    ) -> None:
        """Applies the mean of a checked gradient to each key's row, creating rows for admitted keys.

        The rows do not count as changed for the subscriber `source`, unless they are rounded, by `draw`, as
        bfloat16. `scores` float32[N] are those of the keys in the other table, if that decides about
        admission; `step` is of the optimizer's schedule.
        """
        if not grad.keys.size:
            return
        keys = read_only(grad.keys)
        hyper, decay = self._tuning.at(step, staleness)
        # The keys that get a row in `apply_rows`: those of candidates have one by then.
        if self.spec.admission is None:
            admitted = _ALL_ADMITTED
        elif self._candidates is not None or scores is None:
            admitted = read_only(np.zeros(keys.size, np.uint8))
        else:
            enough = scores >= np.float32(self.spec.admission.threshold)
            admitted = read_only(enough.view(np.uint8))
        push = Push(
            keys=keys,
            grads=read_only(grad.values),
            scale=np.float32(1.0 / grad.examples),
            decay=decay,
            counts=_NO_COUNTS if grad.counts is None else read_only(grad.counts),
            admitted=admitted,
            now=seconds_of(self._clock),
            source=source if self._has_own_changes else NOBODY,
            draw=np.uint64(draw),
        )
        self._with_room(keys, lambda start: self._apply(hyper, push, start))

    @property
    def _has_own_changes(self) -> bool:
        """Whether a change is known to who made it: a move is no subscriber, and rounding changes more."""
        return self._regions.subscribers.num_subscribers > 0 and not self.spec.is_bfloat16

    def _apply(self, hyper: Any, push: Push, start: int) -> int:
        """Applies a push from key `start` until a shard is full; returns the same as `apply_rows`."""
        if self._candidates is None:
            return apply_rows(self._arrays, self._new_row, hyper, push, start)
        admit, counts, rule = self._candidates.admission
        stop = admit(self._arrays, self._new_row, counts, rule, push, start)
        counted = push._replace(
            keys=push.keys[:stop],
            grads=push.grads[:stop],
            counts=push.counts[:stop],
            admitted=push.admitted[:stop],
        )
        return apply_rows(self._arrays, self._new_row, hyper, counted, start)

    def write(self, rows: Rows, *, draw: int = 0) -> None:
        """Writes whole rows of this server's shards, as from a checkpoint; rounds bfloat16 by `draw`.

        Statistics that this table does not keep are dropped; missing ones start at `unknown_statistics`.
        Raises CheckpointError, without a change, if rows have other widths than this table's.
        """
        self._require_widths(rows, self.spec.dim, self.state_width, {0, STATISTICS_WIDTH})
        self._write(rows, draw, self._server_index)

    def _write(self, rows: Rows, draw: int, server: int) -> None:
        counts = self._count_by_shard(rows.keys, server)
        with self._locked(range(self.spec.num_shards)):
            for shard in np.flatnonzero(counts).tolist():
                self._regions.expect_rows(shard, int(counts[shard]))
        keys, weights, state = read_only(rows.keys), read_only(rows.weights), read_only(rows.state)
        statistics = rows.statistics
        if statistics.shape[1] != self._regions.layout.statistics_width:
            now = seconds_of(self._clock)
            statistics = unknown_statistics(keys.size, self._regions.layout.statistics_width, now)
        statistics = read_only(statistics)
        self._with_room(
            keys,
            lambda start: write_rows(
                self._arrays, keys, weights, state, statistics, np.uint64(draw), start
            ),
            server,
        )

    def _require_widths(
        self, rows: Rows, dim: int, state_width: int, statistics_widths: Set[int]
    ) -> None:
        """Raises CheckpointError unless a kernel can write these rows within its arrays."""
        size = rows.keys.size
        found = {"weights": rows.weights.shape, "optimizer state": rows.state.shape}
        expected = {"weights": (size, dim), "optimizer state": (size, state_width)}
        for what, shape in found.items():
            if shape != expected[what]:
                raise CheckpointError(
                    f"table {self.spec.name!r} has {what} of width {expected[what][-1]} for optimizer "
                    f"{self.spec.optimizer.name!r}, but {size} rows have {what} of shape {shape}: they "
                    "belong to another table, or were altered"
                )
        if len(rows.statistics) != size or rows.statistics.shape[1] not in statistics_widths:
            raise CheckpointError(
                f"table {self.spec.name!r} has statistics of width {STATISTICS_WIDTH}, but {size} rows have "
                f"statistics of shape {rows.statistics.shape}: they were altered"
            )

    def write_candidates(self, rows: Rows) -> None:
        """Writes candidates (keys without a row) of this server's shards, as from a checkpoint.

        Raises SpecError if the table does not count candidates exactly, and CheckpointError, without a
        change, if they have other widths than candidates.
        """
        self._require_widths(rows, 0, 0, {STATISTICS_WIDTH})
        self._write_candidates(rows, self._server_index)

    def _write_candidates(self, rows: Rows, server: int) -> None:
        candidates = self._require_exact()
        keys, statistics = read_only(rows.keys), read_only(rows.statistics)
        self._with_room(keys, lambda start: candidates.write(keys, statistics, start), server)

    def _require_exact(self) -> ExactCandidates:
        if not isinstance(self._candidates, ExactCandidates):
            raise SpecError(f"table {self.spec.name!r} has no exact counts of keys without a row")
        return self._candidates

    def write_counters(
        self, shard: int, saved: NDArray[np.uint8], *, start: int | None = None
    ) -> None:
        """Overwrites the Bloom filter's counters of a shard, as from a checkpoint with the same admission.

        `start` is the byte at which a part of them begins; None: these are all. Raises SpecError if the table
        has no Bloom filter, CheckpointError if it has another number of counters.
        """
        candidates = self._candidates
        if not isinstance(candidates, EstimatedCandidates):
            raise SpecError(f"table {self.spec.name!r} has no counters")
        expected, first = candidates.filter.shard_bytes, start or 0
        stop = first + saved.size
        is_part = first < stop < expected and stop % PASSES_BYTES == 0
        if first % PASSES_BYTES or not (stop == expected or (is_part and start is not None)):
            raise CheckpointError(
                f"table {self.spec.name!r} has {expected} bytes of counters in each shard, but shard "
                f"{shard} was saved with {saved.size}: they belong to another filter, or were altered"
            )
        with self._locks[shard]:
            candidates.filter.from_bytes(shard, saved, first)

    def counts_as(self, spec: TableSpec) -> bool:
        """Whether this table can load the candidates or counters of a table with this spec."""
        candidates, admission = self._candidates, spec.admission
        return candidates is not None and admission is not None and candidates.can_count(admission)

    def take_candidates(self, table: "SparseTable") -> None:
        """Takes over the candidates of a table with the same shards, if they count for this one, too."""
        if table._candidates is not None and self.counts_as(table.spec):
            self._candidates = table._candidates
            self._candidates.declare(self.spec)

    def take_changed(self, subscriber: int, max_rows: int) -> tuple[Keys, Values]:
        """Returns up to `max_rows` rows that changed since the subscriber last took them: keys and weights.

        Changes are writes and other workers' pushes. Each call resumes where the last one stopped; fewer rows
        mean that no more had changed. Raises ProtocolError without such a subscriber.
        """
        if not 0 <= subscriber < self._regions.subscribers.num_subscribers:
            raise ProtocolError(
                f"table {self.spec.name!r} records changes for {self._regions.subscribers.num_subscribers} "
                f"subscribers, not for subscriber {subscriber}"
            )
        num_rows = self._num_rows.copy()  # rows inserted later wait for the next call
        size = min(max_rows, int(num_rows.sum()))
        keys, weights = np.empty(size, np.uint64), np.empty((size, self.spec.dim), np.float32)
        count, found = 0, np.empty(size, np.int64)
        for shard, start, stop in self._regions.subscribers.stretches(subscriber, num_rows):
            if count == size:
                break
            with self._locks[shard]:
                taken, row = take_changed_rows(
                    self._arrays, shard, start, stop, subscriber, found[count:]
                )
                new, rows = slice(count, count + taken), found[count : count + taken]
                keys[new] = self._arrays.keys[rows, 0]
                weights[new] = self._regions.layout.weights_in(self._arrays.slab[rows])
            count += taken
            self._regions.subscribers.stop_at(subscriber, shard, row)
        return keys[:count], weights[:count]

    def shrink(self, *, max_norm: float | None = None, dry_run: bool = False) -> Shrunk:
        """Ends a pass: ages the rows' statistics, and removes expired rows (removal.py).

        Locks one shard at a time. A removed key is like one that was never pushed; subscribers do not learn
        of it. Candidates age and expire by the same rules. `max_norm` also removes rows whose weights have an
        L2 norm of at most this; `dry_run` only returns what would be removed.
        """
        now = int(seconds_of(self._clock))
        rule = expiry_rule(self.spec, now=now, max_norm=max_norm, is_dry_run=dry_run)
        removed = Shrunk()
        for shard in self.shards:
            with self._locks[shard]:
                shrunk = shrink_shard(self._regions, shard, self.spec.dim, rule)
                self._expired[shard] += 0 if dry_run else shrunk.rows
                if self._candidates is not None:
                    removed += Shrunk(candidates=self._candidates.shrink(shard, rule))
            removed += shrunk
        if self._regions.layout.statistics_width and not dry_run:
            self._regions.tombstones.add_pass()
        return removed

    def export_shard(self, shard: int) -> Rows:
        """Returns a copy of one shard's rows, ascending by key."""
        with self._locks[shard]:
            return self._regions.sorted_rows(shard)

    # Moves of shards to another server, which puts what this one lets it take

    def begin_move(self, shards: Sequence[int]) -> None:
        """Has `take_moved` return all rows and candidates of `shards`, once, and then those that change."""
        with self._locked(range(self.spec.num_shards)):
            for regions in self._moved_regions:
                regions.begin_move(shards)

    @property
    def _moved_regions(self) -> list[RowRegions]:
        """Rows and, if they are counted exactly, candidates."""
        candidates = self._candidates
        exact = [candidates.regions] if isinstance(candidates, ExactCandidates) else []
        return [self._regions, *exact]

    def take_moved(self, shards: Set[int], max_rows: int) -> list[tuple[Rows, Keys]]:
        """Returns rows of `shards` that are new to the move, and keys whose rows were removed before.

        Then, if they are counted exactly, the same of candidates; they are taken of a shard that has no more
        of the former, as a key with a row is no candidate. At most `max_rows` in all, and fewer if no more
        had changed.
        """
        moved, room = self._moved_regions, max_rows
        taken: list[tuple[list[Rows], list[Keys]]] = [([], []) for _ in moved]
        for shard in [each for each in self._regions.moving if each in shards]:
            with self._locks[shard]:
                # The others come first next time.
                self._regions.moving[shard] = self._regions.moving.pop(shard)
                for regions, (rows, removed) in zip(moved, taken, strict=True):
                    more, keys = regions.take_moved(shard, room)
                    room -= more.keys.size + keys.size
                    rows.append(more)
                    removed.append(keys)
            if not room:
                break
        return [(joined_rows(rows), np.concatenate(removed)) for rows, removed in taken if rows]

    def put_moved(self, rows: Rows, removed: Keys, *, candidates: bool = False) -> None:
        """Writes rows, or candidates, of shards that this server does not have yet; first removes some.

        Raises SpecError, ProtocolError or CheckpointError, without a change, if the table has no such
        candidates, they are of other shards, or have other widths.
        """
        if candidates:
            self._require_exact()
        widths = {STATISTICS_WIDTH if candidates else self._regions.layout.statistics_width}
        dim, state_width = (0, 0) if candidates else (self.spec.dim, self.state_width)
        if rows.keys.size:  # no rows have no widths in a message
            self._require_widths(rows, dim, state_width, widths)
        for keys in (rows.keys, removed):
            counts = self._count_by_shard(keys, ANY_SERVER)
            if counts[self.shards].any():
                raise ProtocolError(
                    f"rows of table {self.spec.name!r} were moved to a server that has their shard already"
                )
        own, *exact = self._moved_regions
        if not candidates:
            self._remove(own, removed)
        for regions in exact:  # of a key with a row, too
            self._remove(regions, removed if candidates else np.concatenate([removed, rows.keys]))
        if candidates:
            self._write_candidates(rows, ANY_SERVER)
        else:
            self._write(rows, 0, ANY_SERVER)

    def _remove(self, regions: RowRegions, keys: Keys) -> None:
        if keys.size:
            with self._locked_for(keys, ANY_SERVER):
                remove_keys(regions.arrays, read_only(keys))

    def counters_of_shard(self, shard: int) -> NDArray[np.uint8]:
        """Returns a copy of a shard's counters; empty if candidates are not counted by a filter."""
        if not isinstance(self._candidates, EstimatedCandidates):
            return np.empty(0, np.uint8)
        with self._locks[shard]:
            return self._candidates.filter.to_bytes(shard)

    def loads_of_shards(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns this server's shards, the rows of each, and the keys of its pulls and pushes so far.

        Each is int64[N]. Keys are about so many: two threads at once may lose some.
        """
        shards = np.array(self.shards, np.int64)  # once: they may move
        return shards, self._num_rows[shards], self._accesses[shards]

    def place(self, shard_map: ShardMap, server_index: int) -> None:
        """Has the shards of a server in a map from now on; their rows are here. Ends a move."""
        with self._locked(range(self.spec.num_shards)):
            self._shard_map, self._server_index = shard_map, server_index
            self.shards = shard_map.shards_of(server_index, self.spec.num_shards)
            self._regions.place(self.shards)
            if self._candidates is not None:
                self._candidates.place(self.shards)

    def drop_others(self) -> None:
        """Removes the rows and candidates of shards that the table does not have."""
        for shard in set(range(self.spec.num_shards)).difference(self.shards):
            with self._locks[shard]:
                drop_all(self._regions, shard)
                if self._candidates is not None:
                    self._candidates.drop(shard)

    def prepare_snapshot(self) -> None:
        """Allocates memory for `begin_snapshot` without locking the table; optional."""
        with suppress(MemoryError):  # begin_snapshot reports it
            self._regions.snapshot.prepare(self._num_rows.copy())

    def begin_snapshot(self, *, changes_only: bool = False) -> TableSnapshot:
        """Returns a snapshot of the table, to be copied while pushes continue, until `end_snapshot`.

        With `changes_only` it has only the changes since the last saved snapshot. Raises ProtocolError if the
        last one has not ended, UnknownChangesError if some changes are unknown.
        """
        with self._locked(range(self.spec.num_shards)):
            if self._regions.snapshot.is_in_snapshot:
                raise ProtocolError(
                    f"table {self.spec.name!r} is being saved: wait for the save to end"
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
        """Marks all rows clean: they are as in a checkpoint."""
        with self._locked(range(self.spec.num_shards)):
            self._regions.clear_dirty()
            self._regions.tombstones.restart()

    def end_snapshot(self, *, saved: bool) -> None:
        """Releases the snapshot; unless it was saved, rows that were dirty before it are dirty again."""
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

    def _with_room(
        self, keys: Keys, kernel: Callable[[int], int], server: int | None = None
    ) -> None:
        """Runs a kernel until it has done all keys; makes room when it stops at a key of a full shard."""
        position = 0
        while True:
            with self._locked_for(keys, server):
                position = kernel(position)
            if position == keys.size:
                return
            shard = int(shard_of(keys[position], self.spec.num_shards))
            with self._locked(range(self.spec.num_shards)):
                if self._candidates is not None and self._candidates.grow(shard):
                    continue  # the table itself may have room
                if self._regions.is_full(shard):
                    self._evicted[shard] += evict_rows(self._regions, shard, self.spec)
                self._regions.grow(shard)

    def _count_by_shard(self, keys: Keys, server: int | None = None) -> NDArray[np.int64]:
        """As `ShardMap.count_by_shard`, of this server if no other is given."""
        server = self._server_index if server is None else server
        return self._shard_map.count_by_shard(read_only(keys), self.spec.num_shards, server)

    @contextmanager
    def _locked_for(self, keys: Keys, server: int | None = None) -> Iterator[NDArray[np.int64]]:
        """Holds the locks of the shards of `keys`, and gives the number of keys in each shard."""
        while True:
            shard_map = self._shard_map
            counts = self._count_by_shard(keys, server)
            with self._locked(np.flatnonzero(counts).tolist()):
                # Else shards may have moved away before they were locked.
                if self._shard_map is shard_map:
                    yield counts
                    return

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
