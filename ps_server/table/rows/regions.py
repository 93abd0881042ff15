"""Regions of a table: for each shard the slab's rows, the index and the record of changes.

They grow and shrink here; kernels read and write them through `arrays`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ps_server.table.changes.dirty_rows import CopyOnWrite
from ctr_ps.ps_server.table.changes.subscribers import Subscribers
from ctr_ps.ps_server.table.changes.tombstones import Tombstones
from ctr_ps.ps_server.table.memory.arena import RESERVED_REGION_BYTES, Arena
from ctr_ps.ps_server.table.memory.hash_index import (
    INITIAL_SLOTS,
    MAX_LOAD_PERCENT,
    TableArrays,
    has_room,
    rebuild_index,
    slots_for,
)
from ctr_ps.ps_server.table.memory.layout import RowLayout
from ctr_ps.ps_server.table.rows.removal import drop_rows

VALUE_BYTES = 4
SLOT_BYTES = 8
NEARLY_FULL_PERCENT = MAX_LOAD_PERCENT * 9 // 10
"""An index that is fuller doubles when that of another shard does."""

HUGE_PAGES_FROM_BYTES = 8 * 2**20
"""From this size of its rows a shard grows by huge pages, of which the last is partly unused."""

NO_LIMIT = 2**62
"""A limit of rows that no shard reaches."""


class RowRegions:
    """Rows, index and changes of some shards. Not thread-safe: a table locks its shards.

    Attributes:
        layout: Columns of a row.
        arrays: Passed to kernels; replaced when memory moves.
        subscribers: Changed rows of each subscriber.
        snapshot: Dirty rows and, during a snapshot, old versions of rows.
        tombstones: Keys removed since the last snapshot.
        num_rows: int64[num_shards].
    """

    def __init__(
        self,
        layout: RowLayout,
        *,
        num_shards: int,
        shards: Sequence[int],
        num_subscribers: int = 0,
        region_bytes: int = RESERVED_REGION_BYTES,
    ) -> None:
        self.layout = layout
        self._shards = shards
        self._num_shards = num_shards
        self._slab = Arena(
            np.float32, num_regions=num_shards, width=layout.stride, region_bytes=region_bytes
        )
        self.subscribers = self._new_subscribers(num_subscribers)
        self.snapshot = CopyOnWrite(
            num_shards=num_shards, rows=self._slab.region_rows, row_words=layout.stride // 2
        )
        self.tombstones = Tombstones()
        # Two regions a shard: a growing index moves from one to the other.
        self._index = Arena(
            np.uint64, num_regions=2 * num_shards, width=1, region_bytes=region_bytes // 4
        )
        self._index.reserve(INITIAL_SLOTS)
        self._index_side = np.zeros(num_shards, np.int64)
        self._num_slots = np.full(num_shards, INITIAL_SLOTS, np.int64)
        self.num_rows = np.zeros(num_shards, np.int64)
        self._max_rows = NO_LIMIT
        self.arrays = self._view()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its change words."""
        return VALUE_BYTES * self.layout.stride + self.subscribers.row_bytes

    @property
    def new_row_bytes(self) -> int:
        """Most bytes of a new row, with its slots in a newly doubled index."""
        return self.row_bytes + SLOT_BYTES * (200 // MAX_LOAD_PERCENT + 1)

    @property
    def index_slots(self) -> int:
        """Slots of the index, of all shards."""
        return int(self._num_slots[self._shards].sum())

    @property
    def size_bytes(self) -> int:
        """Bytes of rows, change words and index."""
        return int(self.num_rows.sum()) * self.row_bytes + SLOT_BYTES * self.index_slots

    def limit_rows(self, max_rows: int) -> None:
        """Limits the rows of each shard; all shards must be locked."""
        self._max_rows = max_rows
        self.arrays = self._view()

    def is_full(self, shard: int) -> bool:
        """Whether a shard has reached the limit of rows."""
        return bool(self.num_rows[shard] >= self._max_rows)

    def rows_of(self, shard: int) -> slice:
        """Returns the positions of a shard's rows in the slab."""
        first = shard * self._slab.region_rows
        return slice(first, first + int(self.num_rows[shard]))

    def record_changes(self, num_subscribers: int) -> None:
        """Records changes for subscribers from now on; initially every row counts as changed."""
        self.subscribers = self._new_subscribers(num_subscribers)
        self.subscribers.reserve(int(self.num_rows.max()))
        self.subscribers.mark_all(self.num_rows)
        self.arrays = self._view()

    def begin_snapshot(self) -> None:
        """Begins a snapshot of all rows; all shards must be locked. If memory is short, changes nothing."""
        self.snapshot.begin(self.num_rows)
        self.arrays = self._view()

    def clear_dirty(self) -> None:
        """Marks all rows clean; all shards must be locked."""
        self.snapshot.clear_dirty(self.num_rows)
        self.arrays = self._view()

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the snapshot; all shards must be locked."""
        self.snapshot.end(saved=saved)
        self.arrays = self._view()

    def grow(self, shard: int) -> bool:
        """Makes room for a row in one shard; False if there was room. All shards must be locked."""
        if has_room(self.arrays, shard):
            return False
        num_rows = int(self.num_rows[shard]) + 1
        try:
            self._slab.reserve(num_rows)
            self.subscribers.reserve(num_rows)
            self.snapshot.reserve(num_rows)
            if 100 * num_rows > MAX_LOAD_PERCENT * int(self._num_slots[shard]):
                # Hashes spread keys evenly, so the others are nearly full too. Each on its own would be a
                # kernel that stops, all locks and a new view of all arrays.
                is_nearly_full = 100 * self.num_rows > NEARLY_FULL_PERCENT * self._num_slots
                self._double_indexes(np.flatnonzero(is_nearly_full).tolist())
        finally:  # the slab may have moved before memory ran out for the index
            self.arrays = self._view()
        return True

    def expect_rows(self, shard: int, num_rows: int) -> None:
        """Sizes the index of a shard without rows for `num_rows` rows; all shards must be locked."""
        slots = slots_for(num_rows)
        if not self.num_rows[shard] and slots > self._num_slots[shard]:
            self._resize_indexes([shard], [slots])
            self.arrays = self._view()
            first = shard * self._slab.region_rows
            self._slab.expect(first, first + min(num_rows, self._slab.region_rows))

    def freed_bytes(self, shard: int, num_removed: int) -> int:
        """Returns the bytes that removing `num_removed` rows of a shard frees."""
        if not num_removed:
            return 0
        slots_left = slots_for(int(self.num_rows[shard]) - num_removed)
        slots_freed = int(self._num_slots[shard]) - slots_left
        return num_removed * self.row_bytes + SLOT_BYTES * slots_freed

    def remove_rows(self, shard: int, to_remove: NDArray[np.uint8]) -> None:
        """Removes rows of a locked shard, those with 1 in uint8[rows of the shard]; frees their memory."""
        num_rows = int(self.num_rows[shard])
        removed = self.arrays.keys[self.rows_of(shard), 0][to_remove.astype(np.bool_)]
        kept = drop_rows(self.arrays, shard, to_remove)
        if kept < num_rows:
            self.tombstones.add_removed(shard, removed, num_rows)
            self._free_rows(shard, kept, num_rows)

    def _free_rows(self, shard: int, start: int, stop: int) -> None:
        first = shard * self._slab.region_rows
        self._slab.release(first + start, first + stop)
        self.subscribers.release(shard, start, stop)
        first_slot = int(self.arrays.slot_starts[shard])
        self._index.release(first_slot, first_slot + int(self._num_slots[shard]))
        self._num_slots[shard] = slots_for(start)
        rebuild_index(self.arrays, shard)

    def _new_subscribers(self, num_subscribers: int) -> Subscribers:
        return Subscribers(
            num_subscribers,
            shards=self._shards,
            num_shards=self._num_shards,
            rows=self._slab.region_rows,
        )

    def _view(self) -> TableArrays:
        regions = 2 * np.arange(self._num_shards) + self._index_side
        return TableArrays(
            slots=self._index.array.reshape(-1),
            slot_starts=regions * self._index.region_rows,
            num_slots=self._num_slots,
            num_rows=self.num_rows,
            max_rows=self._max_rows,
            slab=self._slab.array,
            keys=self._slab.array.view(np.uint64),
            region_rows=self._slab.region_rows,
            change_words=self.subscribers.words,
            change_rows=self.subscribers.region_rows,
            snapshot=self.snapshot.arrays,
            statistics_column=self.layout.statistics_column,
            base_column=self.layout.base_column,
            num_shards=self._num_shards,
        )

    def _double_indexes(self, shards: Sequence[int]) -> None:
        """Doubles the index of shards, and requests huge pages for the rows to come."""
        self._resize_indexes(shards, [2 * int(self._num_slots[shard]) for shard in shards])
        for shard in shards:
            slots, num_rows = int(self._num_slots[shard]), int(self.num_rows[shard])
            if VALUE_BYTES * self.layout.stride * num_rows >= HUGE_PAGES_FROM_BYTES:
                first = shard * self._slab.region_rows
                most = min(slots * MAX_LOAD_PERCENT // 100, self._slab.region_rows)
                self._slab.expect(first + num_rows, first + most)

    def _resize_indexes(self, shards: Sequence[int], slots: Sequence[int]) -> None:
        """Rebuilds the indexes of shards with new numbers of slots; does not update `arrays`."""
        self._index.reserve(max(slots))
        old_regions = [2 * shard + int(self._index_side[shard]) for shard in shards]
        old_slots = self._num_slots[shards].tolist()
        self._num_slots[shards] = slots
        self._index_side[shards] ^= 1
        view = self._view()
        for shard, region, size in zip(shards, old_regions, old_slots, strict=True):
            first_slot = int(view.slot_starts[shard])
            self._index.expect(first_slot, first_slot + int(self._num_slots[shard]))
            rebuild_index(view, shard)
            start = region * self._index.region_rows
            self._index.release(start, start + size)
