"""Copying the rows of a cut out of a table that others train meanwhile.

    keys, stretch by stretch -> order -> rows, stretch by stretch, each to its place in that order

A shard is locked for one stretch at a time, for no longer than it takes to copy it: a push that touches the
shard waits for microseconds. Sorting and placing happen between the stretches.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protos.gradients import Values
from protos.jit import kernel
from protos.spec import TableSpec
from ps_server.checkpoint.rows import Rows
from ps_server.table.cut import ROW_WORDS
from ps_server.table.row_regions import RowRegions
from ps_server.table.since_cut import SinceCut

STRETCH_ROWS = 2048
"""Rows copied under one lock. 180 KB of dim 10 with Adagrad, in the cache until they are placed."""


@kernel
def place_columns(
    rows: Values, first_column: int, places: NDArray[np.int64], start: int, out: Values
) -> None:
    """Writes columns of `rows` float32[n, W] to rows `places[start : start + n]` of `out` float32[N, D]."""
    for i in range(rows.shape[0]):
        place = places[start + i]
        for j in range(out.shape[1]):
            out[place, j] = rows[i, first_column + j]


class ShardCopy:
    """One shard's rows at the cut, in the making. Not thread-safe; others may push between steps."""

    def __init__(
        self,
        regions: RowRegions,
        lock: threading.Lock,
        shard: int,
        stretch_rows: int,
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        """Copies from regions that are cut, whose shard `lock` guards.

        Args:
            regions: What to copy from.
            lock: Of the shard.
            shard: Which.
            stretch_rows: Rows copied under one lock.
            numbers: int64[N] ascending, which rows at the cut to copy; None: all.
        """
        self._regions = regions
        self._lock = lock
        self._shard = shard
        self._cut_rows = int(regions.arrays.cut.cut_rows[shard])
        self._numbers = numbers
        self._num_rows = self._cut_rows if numbers is None else numbers.size
        self._next = 0
        self._places: NDArray[np.int64] | None = None
        self._stretch = np.empty(
            (min(stretch_rows, self._num_rows), regions.layout.stride), np.float32
        )
        self._keys = np.empty(self._num_rows, np.uint64)
        self._weights = np.empty((self._num_rows, regions.layout.dim), np.float32)
        self._state = np.empty((self._num_rows, regions.layout.state_width), np.float32)
        self._statistics = np.empty((self._num_rows, regions.layout.statistics_width), np.float32)

    @property
    def is_done(self) -> bool:
        """Whether all rows have been copied."""
        return self._places is not None and self._next == self._num_rows

    def step(self) -> None:
        """Copies a stretch: of the keys, and when all are there, of whole rows."""
        if self._places is None:
            self._read_keys()
        else:
            self._copy_rows(self._places)

    def rows(self) -> Rows:
        """Returns the shard, ascending by key; all rows have been copied."""
        return Rows(
            keys=self._keys,
            weights=self._weights,
            state=self._state,
            statistics=self._statistics,
        )

    def _stretch_bounds(self) -> tuple[int, int, slice | NDArray[np.int64]]:
        """Returns the next stretch of the copy: its start and stop, and where its rows stand in the slab."""
        start, stop = self._next, min(self._next + len(self._stretch), self._num_rows)
        first = self._shard * self._regions.arrays.region_rows
        if self._numbers is None:
            return start, stop, slice(first + start, first + stop)
        return start, stop, first + self._numbers[start:stop]

    def _wanted(self, kept: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Returns those of kept rows that are to be copied, and where in the copy they belong."""
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
            kept = self._regions.cut.kept_rows(self._shard)
            if not self._num_rows:
                self._regions.cut.advance(self._shard, self._cut_rows)
        self._next = stop
        if stop < self._num_rows:
            return
        kept, positions = self._wanted(kept)
        self._keys[positions] = kept[:, ROW_WORDS]  # others may stand in their places by now
        order = np.argsort(self._keys)
        self._keys = self._keys[order]
        self._places = np.empty_like(order)
        self._places[order] = np.arange(self._num_rows)
        self._next = 0

    def _copy_rows(self, places: NDArray[np.int64]) -> None:
        cut = self._regions.cut
        with self._lock:
            start, stop, where = self._stretch_bounds()
            stretch = self._stretch[: stop - start]
            stretch[:] = self._regions.arrays.slab[where]
            is_last = stop == self._num_rows
            cut.advance(self._shard, self._cut_rows if is_last else self._first_left(stop))
            kept = cut.kept_rows(self._shard)
        self._place(stretch, 0, places, start)
        self._next = stop
        if stop < self._num_rows:
            return
        kept, positions = self._wanted(kept)
        self._place(kept.view(np.float32), 2 * ROW_WORDS, places[positions], 0)
        cut.release(self._shard)

    def _first_left(self, stop: int) -> int:
        """Returns the number of the first row that is not copied yet."""
        return stop if self._numbers is None else int(self._numbers[stop])

    def _place(
        self, rows: Values, first_column: int, places: NDArray[np.int64], start: int
    ) -> None:
        layout = self._regions.layout
        for columns, out in (
            (layout.weights, self._weights),
            (layout.state, self._state),
            (layout.statistics, self._statistics),
        ):
            place_columns(rows, first_column + columns.start, places, start, out)


@dataclass(frozen=True, slots=True)
class CountersCut:
    """Copies of a filter's counters: a `ps_server.checkpoint.rows.CountersSource`."""

    spec: TableSpec
    shards: Sequence[int]
    counters: Mapping[int, NDArray[np.uint8]]

    def export_shard(self, shard: int) -> NDArray[np.uint8]:
        """Returns a shard's counters."""
        return self.counters[shard]


class TableCut:
    """A table as it was at one moment, until that cut ends: a `ps_server.checkpoint.rows.TableSource`.

    Thread-safe; each shard comes out once.

    Attributes:
        spec: What the table was declared to be.
        shards: Numbers of the shards held.
        state_width: Columns of optimizer state in a row.
        statistics_width: Columns of statistics in a row.
        candidates: What the table counted of keys without a row.
    """

    def __init__(
        self,
        spec: TableSpec,
        shards: Sequence[int],
        regions: RowRegions,
        locks: Sequence[threading.Lock],
        candidates: "TableCut | CountersCut | None" = None,
        *,
        changes_only: bool = False,
    ) -> None:
        """Reads from regions that are cut, whose shards `locks` guard; perhaps only rows that changed."""
        self._changes_only = changes_only
        self.candidates = candidates
        self.spec = spec
        self.shards = shards
        self.state_width = regions.layout.state_width
        self.statistics_width = regions.layout.statistics_width
        self._regions = regions
        self._locks = locks

    @property
    def num_rows(self) -> int:
        """Rows at the cut."""
        return int(self._regions.arrays.cut.cut_rows.sum())

    def copy_shard(self, shard: int, *, stretch_rows: int = STRETCH_ROWS) -> ShardCopy:
        """Begins to copy a shard."""
        numbers = None
        if self._changes_only:
            numbers = np.flatnonzero(self._regions.cut.changed_before(shard))
        return ShardCopy(self._regions, self._locks[shard], shard, stretch_rows, numbers)

    def export_shard(self, shard: int) -> Rows:
        """Returns a shard as it was, ascending by key."""
        copy = self.copy_shard(shard)
        while not copy.is_done:
            copy.step()
        return copy.rows()

    def removed(self) -> "RemovedCut":
        """Returns which keys lost their row before the cut, and since the one before."""
        return RemovedCut(replace(self.spec, dim=0), self.shards, self._regions.since_cut)


@dataclass(frozen=True, slots=True)
class RemovedCut:
    """Keys that lost their row from one cut to the next: a `ps_server.checkpoint.rows.RemovedSource`."""

    spec: TableSpec
    shards: Sequence[int]
    since_cut: SinceCut
    state_width: int = 0
    statistics_width: int = 0

    @property
    def passes(self) -> int:
        """Passes from one cut to the next."""
        return self.since_cut.passes

    def export_shard(self, shard: int) -> Rows:
        """Returns a shard's keys, as rows without columns."""
        keys = self.since_cut.removed_keys(shard)
        nothing = np.empty((keys.size, 0), np.float32)
        return Rows(keys=keys, weights=nothing, state=nothing, statistics=nothing)
