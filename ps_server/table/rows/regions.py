"""Regions of a table: for each shard the slab's rows, the index and the record of changes.

They grow and shrink here; kernels read and write them through `arrays`. Kernels that remove rows:

    remove_row:  | a | b | X | d | e |   ->   | a | b | e | d |      the last row moves into the hole
    drop_rows:   | a | b | X | d | e |   ->   | a | b | d | e |      rows move up; the index is rebuilt after

In the index, `remove_row` deletes without tombstones (Knuth, The Art of Computer Programming 3, section 6.4,
algorithm R): lookups stay as short as if the key had never been inserted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.keys import Keys, mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import TableSpec
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_server.table.changes import (
    CopyOnWrite,
    Subscribers,
    Tombstones,
    mark_dirty_before_move,
    move_dirty_bit,
)
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.memory.arena import (
    HUGE_PAGE,
    RESERVED_REGION_BYTES,
    STAGGER_BYTES,
    Arena,
)
from ctr_ps.ps_server.table.memory.hash_index import (
    INITIAL_SLOTS,
    MAX_LOAD_PERCENT,
    STATISTICS_WIDTH,
    RowLayout,
    TableArrays,
    find_row,
    first_slot,
    has_room,
    next_slot,
    rebuild_index,
    row_of_slot,
    shard_of_hash,
    slots_for,
)
from ctr_ps.ps_server.table.memory.intrinsics import Int
from ctr_ps.ps_server.table.rows.kernels import take_changed_rows

VALUE_BYTES = 4
SLOT_BYTES = 8
NEARLY_FULL_PERCENT = MAX_LOAD_PERCENT * 9 // 10
"""An index that is fuller doubles when that of another shard does."""

HUGE_PAGES_FROM_BYTES = 8 * 2**20
"""From this size of its rows a shard grows by huge pages, of which the last is partly unused."""

SMALL_INDEX_BYTES = 2**20
"""An index that fits begins anywhere within this much; larger ones begin with their region."""

NO_LIMIT = 2**62
"""A limit of rows that no shard reaches."""


def layout_of(spec: TableSpec, *, has_base: bool = False) -> RowLayout:
    """Returns the columns of a table's rows."""
    return RowLayout(
        dim=spec.dim,
        state_width=optimizer_of(spec.optimizer).state_width(spec.dim),
        statistics_width=0 if spec.statistics is None else STATISTICS_WIDTH,
        has_base=has_base,
        is_bfloat16=spec.is_bfloat16,
    )


@dataclass(slots=True)
class MovingShard:
    """What a move has not taken yet of a shard, besides the rows that are marked."""

    removed: list[Keys] = field(default_factory=list)  # keys of rows that were removed
    next_row: int = 0  # where the search for marked rows resumes


class RowRegions:
    """Rows, index and changes of some shards. Not thread-safe: a table locks its shards.

    Kernels take `arrays`, which are replaced when memory moves; `num_rows` is int64[num_shards].
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
        # The shards that a move takes, first those whose changes it took longest ago.
        self.moving: dict[int, MovingShard] = {}
        # Two regions a shard: a growing index moves from one to the other.
        self._index = Arena(
            np.uint64,
            num_regions=2 * num_shards,
            width=1,
            # Of whole huge pages, if it has some.
            region_bytes=region_bytes // 4 // HUGE_PAGE * HUGE_PAGE or region_bytes // 4,
        )
        self._index.reserve(INITIAL_SLOTS)
        self._index_side = np.zeros(num_shards, np.int64)
        self._num_slots = np.full(num_shards, INITIAL_SLOTS, np.int64)
        # Where in its region the index of a shard begins.
        self._index_starts = self._starts_of_indexes(range(num_shards), INITIAL_SLOTS)
        self.num_rows = np.zeros(num_shards, np.int64)
        self._max_rows = NO_LIMIT
        self.arrays = self._view()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its change bytes."""
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
        """Bytes of rows, change bytes and index."""
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

    def rows_at(self, positions: NDArray[np.int64]) -> Rows:
        """Returns copies of the rows at positions int64[N] in the slab; their shards must be locked."""
        slab, layout = self.arrays.slab[positions], self.layout
        return Rows(
            keys=self.arrays.keys[positions, 0],
            weights=layout.weights_in(slab),
            state=slab[:, layout.state],
            statistics=slab[:, layout.statistics],
        )

    def sorted_rows(self, shard: int) -> Rows:
        """Returns copies of a locked shard's rows, ascending by key."""
        rows = self.rows_of(shard)
        return self.rows_at(rows.start + np.argsort(self.arrays.keys[rows, 0]))

    def record_changes(self, num_subscribers: int) -> None:
        """Records changes for subscribers from now on; initially every row counts as changed."""
        self.subscribers = self._new_subscribers(num_subscribers)
        self.subscribers.reserve(int(self.num_rows.max()))
        self.subscribers.mark_all(self.num_rows)
        self.arrays = self._view()

    def begin_move(self, shards: Sequence[int]) -> None:
        """Records changes of `shards` for a move; initially every row counts as changed.

        All shards must be locked.
        """
        if shards and not self.subscribers.row_bytes:
            self.subscribers = self._new_subscribers(0, moves=True)
            self.subscribers.reserve(int(self.num_rows.max()))
        self.moving = {shard: MovingShard() for shard in shards}
        for shard in shards:
            self.mark_for_move(shard)
        self.arrays = self._view()

    def mark_for_move(self, shard: int) -> None:
        """Marks all rows of a locked shard as changed for a move, if that takes the shard."""
        if shard in self.moving:
            self.subscribers.mark_for_move(shard, int(self.num_rows[shard]))

    def take_moved(self, shard: int, most: int) -> tuple[Rows, Keys]:
        """Returns rows of a locked shard that are new to the move, and keys whose rows were removed before.

        At most `most` of both together; fewer mean that no more had changed.
        """
        moving, bit = self.moving[shard], self.subscribers.num_subscribers
        all_removed = np.concatenate([np.empty(0, np.uint64), *moving.removed])
        removed, moving.removed = all_removed[:most], [all_removed[most:]]
        found = np.empty(most - removed.size, np.int64)
        begin, count = moving.next_row, 0
        for start, stop in ((begin, int(self.num_rows[shard])), (0, begin)):
            more, row = take_changed_rows(self.arrays, shard, start, stop, bit, found[count:])
            count += more
            if row < stop:
                moving.next_row = row
                break
        return self.rows_at(found[:count]), removed

    def place(self, shards: Sequence[int]) -> None:
        """The table has `shards` from now on, and no move; all shards must be locked."""
        self._shards = shards
        self.moving = {}
        self.tombstones.forget()
        if self.subscribers.num_subscribers:
            self.subscribers.place(shards)
        else:
            self.subscribers = self._new_subscribers(0)
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
        if kept == num_rows:
            return
        self.tombstones.add_removed(shard, removed, num_rows)
        if shard in self.moving:
            self.moving[shard].removed.append(removed)
        first = shard * self._slab.region_rows
        self._slab.release(first + kept, first + num_rows)
        self.subscribers.release(shard, kept, num_rows)
        first_slot = int(self.arrays.slot_starts[shard])
        self._index.release(first_slot, first_slot + int(self._num_slots[shard]))
        self._num_slots[shard] = slots_for(kept)
        rebuild_index(self.arrays, shard)

    def _new_subscribers(self, num_subscribers: int, *, moves: bool = False) -> Subscribers:
        return Subscribers(
            num_subscribers,
            shards=self._shards,
            num_shards=self._num_shards,
            rows=self._slab.region_rows,
            moves=moves,
        )

    def _view(self) -> TableArrays:
        regions = 2 * np.arange(self._num_shards) + self._index_side
        return TableArrays(
            slots=self._index.array.reshape(-1),
            slot_starts=regions * self._index.region_rows + self._index_starts,
            num_slots=self._num_slots,
            num_rows=self.num_rows,
            max_rows=self._max_rows,
            slab=self._slab.array,
            keys=self._slab.array.view(np.uint64),
            region_rows=self._slab.region_rows,
            change_bytes=self.subscribers.marks,
            change_rows=self.subscribers.region_rows,
            snapshot=self.snapshot.arrays,
            statistics_column=self.layout.statistics.start if self.layout.statistics_width else 0,
            base_column=self.layout.statistics.stop if self.layout.has_base else 0,
            state_column=self.layout.state.start,
            is_bfloat16=self.layout.is_bfloat16,
            bfloat16=self._slab.array.reshape(-1).view(np.uint16),
            num_shards=self._num_shards,
        )

    def _double_indexes(self, shards: Sequence[int]) -> None:
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
        old_starts = self._view().slot_starts[shards].tolist()
        old_slots = self._num_slots[shards].tolist()
        self._num_slots[shards] = slots
        self._index_side[shards] ^= 1
        self._index_starts[shards] = self._starts_of_indexes(shards, self._num_slots[shards])
        view = self._view()
        for shard, start, size in zip(shards, old_starts, old_slots, strict=True):
            first_slot = int(view.slot_starts[shard])
            self._index.expect(first_slot, first_slot + int(self._num_slots[shard]))
            rebuild_index(view, shard)
            self._index.release(start, start + size)

    def _starts_of_indexes(
        self, shards: Sequence[int], slots: NDArray[np.int64] | int
    ) -> NDArray[np.int64]:
        """Returns where in their regions indexes of so many slots begin."""
        starts = np.array(shards) * STAGGER_BYTES % SMALL_INDEX_BYTES // SLOT_BYTES
        has_room = starts + slots <= min(self._index.region_rows, SMALL_INDEX_BYTES // SLOT_BYTES)
        return np.where(has_room, starts, 0)


@kernel
def _slot_of_row(table: TableArrays, shard: Int, row: Int) -> np.int64:
    slot = first_slot(table, shard, mix64(table.keys[row, 0]))
    while row_of_slot(table, shard, table.slots[slot]) != row:
        slot = next_slot(table, shard, slot)
    return slot


@kernel
def _clear_slot(table: TableArrays, shard: Int, slot: Int) -> None:
    """Empties a slot, and moves up the entries after it whose probe sequence passes it."""
    mask = table.num_slots[shard] - 1
    hole, probed = slot, slot
    while True:
        probed = next_slot(table, shard, probed)
        entry = table.slots[probed]
        if entry == np.uint64(0):
            table.slots[hole] = np.uint64(0)
            return
        key = table.keys[row_of_slot(table, shard, entry), 0]
        distance = (probed - first_slot(table, shard, mix64(key))) & mask
        if distance >= (probed - hole) & mask:
            table.slots[hole] = entry
            hole = probed


# Copied by loops: assigning a row to another compiles its error of shapes, too, for 3 s.


@kernel
def _copy_row(table: TableArrays, source: Int, target: Int) -> None:
    for column in range(table.slab.shape[1]):
        table.slab[target, column] = table.slab[source, column]


@kernel
def _copy_marks(table: TableArrays, source: Int, target: Int) -> None:
    for byte in range(table.change_bytes.shape[1]):
        table.change_bytes[target, byte] = table.change_bytes[source, byte]


@kernel
def remove_row(table: TableArrays, shard: Int, row: Int) -> None:
    """Removes a row, a position in `table.slab`; the shard's last row takes its place.

    Its change bytes and dirty bit move with it. The last position is zeroed, as is all memory without a row.
    """
    _clear_slot(table, shard, _slot_of_row(table, shard, row))
    row_in_shard = row - shard * table.region_rows
    last_in_shard = table.num_rows[shard] - 1
    last = shard * table.region_rows + last_in_shard
    marks = shard * table.change_rows
    mark_dirty_before_move(table, shard, row)
    if row != last:
        mark_dirty_before_move(table, shard, last)
        move_dirty_bit(table, shard, last, row)
        slot = _slot_of_row(table, shard, last)
        tag = table.slots[slot] & np.uint64(0xFFFFFFFF00000000)
        table.slots[slot] = tag | np.uint64(row_in_shard + 1)
        _copy_row(table, last, row)
        _copy_marks(table, marks + last_in_shard, marks + row_in_shard)
    table.slab[last] = np.float32(0.0)
    for byte in range(table.change_bytes.shape[1]):  # without subscribers there are no rows of them
        table.change_bytes[marks + last_in_shard, byte] = np.uint8(0)
    table.num_rows[shard] = last_in_shard


@kernel
def remove_keys(table: TableArrays, keys: Keys) -> None:
    """Removes the rows of `keys` uint64[N], of those that have one."""
    for key in keys:
        hashed = mix64(key)
        shard = shard_of_hash(table, hashed)
        row = find_row(table, shard, hashed, key)
        if row >= 0:
            remove_row(table, shard, row)


@kernel
def drop_rows(table: TableArrays, shard: Int, to_remove: NDArray[np.uint8]) -> int:
    """Removes rows from a shard's region, but not from its index, which must be rebuilt.

    The other rows move up in order, with their change bytes and dirty bits. `to_remove` uint8[rows of the
    shard] has 1 for each row to remove. Returns the number of rows left.
    """
    kept = 0
    for row_in_shard in range(table.num_rows[shard]):
        row = shard * table.region_rows + row_in_shard
        if to_remove[row_in_shard] or kept < row_in_shard:
            mark_dirty_before_move(table, shard, row)
        if to_remove[row_in_shard]:
            continue
        if kept < row_in_shard:
            move_dirty_bit(table, shard, row, shard * table.region_rows + kept)
            _copy_row(table, row, shard * table.region_rows + kept)
            marks = shard * table.change_rows
            _copy_marks(table, marks + row_in_shard, marks + kept)
        kept += 1
    table.num_rows[shard] = kept
    return kept
