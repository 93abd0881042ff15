"""Snapshot of a table: its rows at one moment, copied while training continues.

    keys, stretch by stretch -> sort order -> rows, stretch by stretch, each to its place in that order

A shard is locked for one stretch at a time, for as long as it takes to copy it: a push to the shard waits for
microseconds. Sorting and placing happen between stretches, without the lock.
"""

import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.runtime.jit import inlined_kernel, kernel
from ctr_ps.protos.spec import TableSpec
from ctr_ps.ps_server.table.changes import ROW_WORDS
from ctr_ps.ps_server.table.contents import Rows, ShardSource
from ctr_ps.ps_server.table.memory.bfloat16 import load_bfloat16
from ctr_ps.ps_server.table.memory.hash_index import KEY_COLUMNS, RowLayout
from ctr_ps.ps_server.table.memory.intrinsics import Int, borrow, prefetch
from ctr_ps.ps_server.table.rows.regions import RowRegions


class BufferPool:
    """Buffers of one size, reused once nothing refers to them or a view of them. Thread-safe.

    The allocator would keep freed memory, separately for each thread: a save of 1 GB left 80 MB behind, which
    the next save could not use. These return it with the last reference to the pool and its buffers.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[mmap.mmap] = []

    def take(self) -> NDArray[np.uint8]:
        """Returns a buffer, uint8[size_bytes], with undefined content; raises OSError if memory is short."""
        try:
            memory = self._free.pop()
        except IndexError:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, max(1, self._size_bytes), flags)
        # Views refer to the array that has the memory, so this one lives as long as the last of them.
        buffer = np.frombuffer(memory, np.uint8, self._size_bytes)
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return buffer


STRETCH_ROWS = 4096
"""Rows copied under one lock, in 15 us. 360 KB of dim 10 with Adagrad, in the cache until they are placed."""

_ROWS_AHEAD = 12  # prefetch distance of `place_rows`: 11 ns a row instead of 24


@kernel
def inverse_of(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the inverse of a permutation int64[n]."""
    places = np.empty_like(order)
    for place in range(order.size):
        places[order[place]] = place
    return places


@inlined_kernel
def _prefetch_row(flat: Values, width: Int, row: Int) -> None:
    prefetch(flat, row * width)
    prefetch(flat, row * width + width - 1)


@inlined_kernel
def _copy_columns(rows: Values, i: Int, first_column: Int, out: Values, place: Int) -> None:
    for j in range(out.shape[1]):
        out[place, j] = rows[i, first_column + j]


@kernel
def place_rows(
    rows: Values,
    first_column: int,
    state_column: int,
    is_bfloat16: bool,
    places: NDArray[np.int64],
    weights: Values,
    state: Values,
    statistics: Values,
) -> None:
    """Splits rows float32[n, W] into weights, state and statistics, each at its place in three matrices.

    `places` int64[n] are the rows of the matrices, float32[N, D], [N, K] and [N, S]. In `rows`, weights begin
    at `first_column`, as bfloat16 or float32, and state and statistics at `state_column`.
    """
    all_weights, all_state = weights.reshape(-1), state.reshape(-1)
    dim, width, flat_rows = weights.shape[1], 2 * rows.shape[1], rows.reshape(-1).view(np.uint16)
    statistics_column = state_column + state.shape[1]
    for i in range(places.size):
        if i + _ROWS_AHEAD < places.size:
            _prefetch_row(all_weights, weights.shape[1], places[i + _ROWS_AHEAD])
            _prefetch_row(all_state, state.shape[1], places[i + _ROWS_AHEAD])
        if is_bfloat16:
            stored = borrow(flat_rows, i * width + 2 * first_column, dim)
            load_bfloat16(stored, borrow(all_weights, places[i] * dim, dim))
        else:
            _copy_columns(rows, i, first_column, weights, places[i])
        _copy_columns(rows, i, state_column, state, places[i])
        _copy_columns(rows, i, statistics_column, statistics, places[i])


def memory_for(layout: RowLayout, rows: int) -> BufferPool:
    """Returns buffers for copies of shards of at most `rows` rows, with weights as float32."""
    columns = KEY_COLUMNS + layout.dim + layout.state_width + layout.statistics_width
    return BufferPool(4 * columns * rows)


class ShardCopy:
    """Copy of a shard's rows in a snapshot, made in steps of `stretch_rows` under the shard's lock.

    Not thread-safe; pushes may come between steps. `numbers` int64[N], ascending, are the positions in the
    shard of the rows to copy; None: all. `memory` are buffers by `memory_for`; None: its own.
    """

    def __init__(
        self,
        regions: RowRegions,
        lock: threading.Lock,
        shard: int,
        stretch_rows: int,
        numbers: NDArray[np.int64] | None = None,
        memory: BufferPool | None = None,
    ) -> None:
        self._regions = regions
        self._lock = lock
        self._shard = shard
        self._snapshot_rows = int(regions.arrays.snapshot.snapshot_rows[shard])
        self._numbers = numbers
        self._num_rows = self._snapshot_rows if numbers is None else numbers.size
        self._next = 0
        self._places: NDArray[np.int64] | None = None
        self._stretch = np.empty(
            (min(stretch_rows, self._num_rows), regions.layout.stride), np.float32
        )
        layout = regions.layout
        memory = memory or memory_for(layout, self._num_rows)
        buffer, start = memory.take(), 0

        def matrix(columns: int) -> Values:
            nonlocal start
            end = start + 4 * self._num_rows * columns
            found = buffer[start:end].view(np.float32).reshape(self._num_rows, columns)
            start = end
            return found

        self._keys = matrix(KEY_COLUMNS).view(np.uint64).reshape(-1)
        self._weights = matrix(layout.dim)
        self._state = matrix(layout.state_width)
        self._statistics = matrix(layout.statistics_width)

    @property
    def is_done(self) -> bool:
        """Whether all rows have been copied."""
        return self._places is not None and self._next == self._num_rows

    def step(self) -> None:
        """Copies a stretch of keys or, once all keys are copied, of whole rows."""
        if self._places is None:
            self._read_keys()
        else:
            self._copy_rows(self._places)

    def rows(self) -> Rows:
        """Returns the complete copy, ascending by key."""
        return Rows(
            keys=self._keys,
            weights=self._weights,
            state=self._state,
            statistics=self._statistics,
        )

    def _stretch_bounds(self) -> tuple[int, int, slice | NDArray[np.int64]]:
        """Returns the next stretch: start and stop in the copy, and the positions of its rows in the slab."""
        start, stop = self._next, min(self._next + len(self._stretch), self._num_rows)
        first = self._shard * self._regions.arrays.region_rows
        if self._numbers is None:
            return start, stop, slice(first + start, first + stop)
        return start, stop, first + self._numbers[start:stop]

    def _wanted(self, kept: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        numbers = kept[:, 0].astype(np.int64)
        if self._numbers is None:
            return kept, numbers
        positions = np.searchsorted(self._numbers, numbers)
        is_wanted = positions < self._numbers.size
        is_wanted[is_wanted] = self._numbers[positions[is_wanted]] == numbers[is_wanted]
        return kept[is_wanted], positions[is_wanted]

    def _read_keys(self) -> None:
        with self._lock:
            start, stop, where = self._stretch_bounds()
            self._keys[start:stop] = self._regions.arrays.keys[where, 0]
            kept = self._regions.snapshot.kept_rows(self._shard)
            if not self._num_rows:
                self._regions.snapshot.advance(self._shard, self._snapshot_rows)
        self._next = stop
        if stop < self._num_rows:
            return
        kept, positions = self._wanted(kept)
        self._keys[positions] = kept[:, ROW_WORDS]  # other rows may have their positions by now
        order = np.argsort(self._keys)
        self._keys[:] = self._keys[order]
        self._places = inverse_of(order)
        self._next = 0

    def _copy_rows(self, places: NDArray[np.int64]) -> None:
        snapshot = self._regions.snapshot
        with self._lock:
            start, stop, where = self._stretch_bounds()
            stretch = self._stretch[: stop - start]
            stretch[:] = self._regions.arrays.slab[where]
            if stop == self._num_rows:
                copied = self._snapshot_rows
            else:
                copied = stop if self._numbers is None else int(self._numbers[stop])
            snapshot.advance(self._shard, copied)
            kept = snapshot.kept_rows(self._shard)
        self._place(stretch, 0, places[start:stop])
        self._next = stop
        if stop < self._num_rows:
            return
        kept, positions = self._wanted(kept)
        self._place(kept.view(np.float32), 2 * ROW_WORDS, places[positions])
        snapshot.release(self._shard)

    def _place(self, rows: Values, start: int, places: NDArray[np.int64]) -> None:
        """Places rows whose columns begin at `start`."""
        layout = self._regions.layout
        columns = start + KEY_COLUMNS, start + layout.state.start, layout.is_bfloat16
        place_rows(rows, *columns, places, self._weights, self._state, self._statistics)


CountersSource = ShardSource[NDArray[np.uint8]]
"""Counters of one server's shards of a table."""


class TableSnapshot:
    """A table at one moment, until its snapshot ends: a `TableSource`. Thread-safe.

    Reads each shard once, under its lock; with `changes_only` only dirty rows. `candidates` are its
    candidates, or the Bloom filter's counters; None without.
    """

    def __init__(
        self,
        spec: TableSpec,
        shards: Sequence[int],
        regions: RowRegions,
        locks: Sequence[threading.Lock],
        candidates: "TableSnapshot | CountersSource | None" = None,
        *,
        changes_only: bool = False,
    ) -> None:
        self._changes_only = changes_only
        self.candidates = candidates
        self.spec = spec
        self.shards = shards
        self.state_width = regions.layout.state_width
        self.statistics_width = regions.layout.statistics_width
        self._regions = regions
        self._locks = locks
        self._guard = threading.Lock()
        self._memory: BufferPool | None = memory_for(
            regions.layout, int(regions.arrays.snapshot.snapshot_rows.max())
        )
        self._not_exported = set(shards)

    @property
    def num_rows(self) -> int:
        """Rows in the snapshot."""
        return int(self._regions.arrays.snapshot.snapshot_rows.sum())

    def copy_shard(self, shard: int, *, stretch_rows: int = STRETCH_ROWS) -> ShardCopy:
        """Returns a copy of a shard, to be made in steps."""
        numbers = None
        if self._changes_only:
            numbers = np.flatnonzero(self._regions.snapshot.dirty_at_snapshot(shard))
        with self._guard:
            memory = self._memory
            self._not_exported.discard(shard)
            if not self._not_exported:
                self._memory = None  # with the last shard the pool is dropped
        return ShardCopy(self._regions, self._locks[shard], shard, stretch_rows, numbers, memory)

    def export_shard(self, shard: int) -> Rows:
        """Returns a shard's rows, ascending by key; their memory is reused after the last reference."""
        copy = self.copy_shard(shard)
        while not copy.is_done:
            copy.step()
        return copy.rows()

    def removed(self) -> ShardSource[Rows]:
        """Returns the keys removed between the last snapshot and this one, as rows without columns."""
        tombstones = self._regions.tombstones

        def export_shard(shard: int) -> Rows:
            keys = tombstones.removed_keys(shard)
            nothing = np.empty((keys.size, 0), np.float32)
            return Rows(keys=keys, weights=nothing, state=nothing, statistics=nothing)

        spec = replace(self.spec, dim=0)
        return ShardSource(spec, self.shards, export_shard, passes=tombstones.passes)


TableSource = TableSnapshot | ShardSource[Rows]
"""One server's shards of a table, or of its candidates, as rows of dim 0."""
