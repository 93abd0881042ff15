"""Dirty rows: those changed since the last snapshot (what a delta has), and their copy-on-write.

    rows of a shard:  | copied | to be copied | inserted since the snapshot |
                      0   copied_rows     snapshot_rows

A row's dirty bit says that it changed since the last snapshot. A snapshot begins with clean rows, so the
first change of a row finds its bit clear; if the row is still to be copied, that change first keeps the old
version. The copy reads rows from the table, then overwrites them with the kept ones. A kept row belongs to
the position that it had at the snapshot, wherever the row is now.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.runtime.jit import inlined_kernel
from ctr_ps.ps_server.table.memory.arena import Arena
from ctr_ps.ps_server.table.memory.hash_index import BITS_PER_WORD, SnapshotArrays, TableArrays
from ctr_ps.ps_server.table.memory.intrinsics import Int, prefetch

_WORD_SHIFT = 6  # BITS_PER_WORD as a shift: a signed division costs more

ROW_WORDS = 1
"""Words of a kept row before its bytes: the row's position in its shard."""


@inlined_kernel
def _word_of_row(table: TableArrays, shard: Int, row_in_shard: Int) -> np.int64:
    return np.int64(shard * table.snapshot.dirty_words + (row_in_shard >> _WORD_SHIFT))


@inlined_kernel
def prefetch_dirty_bit(table: TableArrays, shard: Int, row: Int) -> None:
    """Prefetches the dirty bit of a row, a position in `table.slab`, for a later `mark_dirty`."""
    prefetch(table.snapshot.dirty, _word_of_row(table, shard, row - shard * table.region_rows))


@inlined_kernel
def mark_dirty(table: TableArrays, shard: Int, row: Int) -> None:
    """Marks a row dirty, a position in `table.slab`; during a snapshot first keeps its old version.

    Call it before the row is changed, and after a new row is inserted.
    """
    row_in_shard = row - shard * table.region_rows
    word = _word_of_row(table, shard, row_in_shard)
    bit = np.uint64(1) << np.uint64(row_in_shard & (BITS_PER_WORD - 1))
    if table.snapshot.dirty[word] & bit:
        return
    table.snapshot.dirty[word] |= bit
    if table.snapshot.copied_rows[shard] <= row_in_shard < table.snapshot.snapshot_rows[shard]:
        place = shard * table.snapshot.kept_rows + table.snapshot.num_kept[shard]
        table.snapshot.num_kept[shard] += 1
        table.snapshot.kept[place, 0] = np.uint64(row_in_shard)
        for column in range(table.keys.shape[1]):
            table.snapshot.kept[place, ROW_WORDS + column] = table.keys[row, column]


@inlined_kernel
def mark_dirty_before_move(table: TableArrays, shard: Int, row: Int) -> None:
    """Keeps the old version of a row, if there is a snapshot, before the row is removed or moved."""
    if table.snapshot.snapshot_rows[shard]:
        mark_dirty(table, shard, row)


@inlined_kernel
def move_dirty_bit(table: TableArrays, shard: Int, source: Int, target: Int) -> None:
    """Moves a row's dirty bit with the row, from `source` to `target` of its shard.

    During a snapshot both positions are dirty by now (`mark_dirty_before_move`) and stay so. If the snapshot
    fails, the bits from before it are restored by position, and the row may have been dirty.
    """
    first = shard * table.region_rows
    words = shard * table.snapshot.dirty_words
    old, new = source - first, target - first
    bit = (
        table.snapshot.dirty[words + old // BITS_PER_WORD] >> np.uint64(old % BITS_PER_WORD)
    ) & np.uint64(1)
    place = np.uint64(new % BITS_PER_WORD)
    table.snapshot.dirty[words + new // BITS_PER_WORD] &= ~(np.uint64(1) << place)
    table.snapshot.dirty[words + new // BITS_PER_WORD] |= bit << place


class CopyOnWrite:
    """Dirty bits of a table's rows and, during a snapshot, old versions of rows. Not thread-safe.

    Address space is reserved for `rows` rows of `row_words` uint64 in each shard. Kernels take `arrays`,
    which are replaced when memory moves.
    """

    def __init__(self, *, num_shards: int, rows: int, row_words: int) -> None:
        self._num_shards = num_shards
        self._row_words = row_words
        self._region_words = _words_for(rows)
        self._dirty = self._new_dirty_bits()
        self._dirty_before: Arena | None = None
        self._next_dirty: Arena | None = None
        self._kept: Arena | None = None
        self._snapshot_rows = np.zeros(num_shards, np.int64)
        self._copied_rows = np.zeros(num_shards, np.int64)
        self._num_kept = np.zeros(num_shards, np.int64)
        self.arrays = self._view()

    def reserve(self, rows: int) -> None:
        """Makes room for the bits of `rows` rows in every shard; if memory is short, changes nothing."""
        self._dirty.reserve(_words_for(rows))
        self.arrays = self._view()

    def prepare(self, num_rows: NDArray[np.int64]) -> None:
        """Allocates the dirty bits of the next snapshot in advance. Thread-safe.

        Without, the first push after a snapshot of 10 M rows took 5 to 14 ms.
        """
        dirty = self._new_dirty_bits()
        dirty.reserve(_words_for(int(num_rows.max())))
        for shard, rows in enumerate(num_rows):
            self._words(dirty, shard)[: _words_for(int(rows))] = 0
        self._next_dirty = dirty

    def begin(self, num_rows: NDArray[np.int64]) -> None:
        """Begins a snapshot of the first `num_rows` int64[num_shards] rows of each shard.

        Takes address space for a copy of all of them, and memory for those that change before they are
        copied. The time does not depend on the number of rows. If memory is short, changes nothing.
        """
        most = int(num_rows.max())
        kept = self._new_kept(most)
        dirty = self._next_dirty or self._new_dirty_bits()
        dirty.reserve(_words_for(most))
        self._next_dirty = None
        self._kept, self._dirty_before, self._dirty = kept, self._dirty, dirty
        self._snapshot_rows[:] = num_rows
        self._copied_rows[:] = 0
        self._num_kept[:] = 0
        self.arrays = self._view()

    def end(self, *, saved: bool) -> None:
        """Ends the snapshot; unless it was saved, rows that were dirty before it are dirty again."""
        before = self._dirty_before
        if before is not None and not saved:
            for shard, num_rows in enumerate(self._snapshot_rows):
                words = _words_for(int(num_rows))
                self._words(self._dirty, shard)[:words] |= self._words(before, shard)[:words]
        self._kept = self._dirty_before = None
        self._snapshot_rows[:] = 0
        self._copied_rows[:] = 0
        self._num_kept[:] = 0
        self.arrays = self._view()

    def clear_dirty(self, num_rows: NDArray[np.int64]) -> None:
        """Marks all rows, int64[num_shards] of them, clean; not allowed during a snapshot."""
        dirty = self._new_dirty_bits()
        dirty.reserve(_words_for(int(num_rows.max())))
        self._dirty = dirty
        self.arrays = self._view()

    @property
    def is_in_snapshot(self) -> bool:
        """Whether a snapshot has begun and not ended."""
        return self._dirty_before is not None

    def kept_rows(self, shard: int) -> NDArray[np.uint64]:
        """Returns the old rows of a shard kept so far, uint64[N, ROW_WORDS + row_words]: position, bytes."""
        first = shard * self.arrays.kept_rows
        return self.arrays.kept[first : first + int(self._num_kept[shard])]

    def advance(self, shard: int, copied_rows: int) -> None:
        """Records that the first rows of a shard have been copied, so that no more of them are kept."""
        self._copied_rows[shard] = copied_rows

    def release(self, shard: int) -> None:
        """Releases the memory of a shard's kept rows; all its rows have been copied."""
        if self._kept is not None:
            first = shard * self._kept.region_rows
            self._kept.release(first, first + int(self._num_kept[shard]))

    def dirty_at_snapshot(self, shard: int) -> NDArray[np.bool_]:
        """Returns which rows of a shard changed between the last snapshot and this one, bool[N]."""
        dirty = self._dirty if self._dirty_before is None else self._dirty_before
        num_rows = int(self._snapshot_rows[shard])
        words = self._words(dirty, shard)[: _words_for(num_rows)].astype("<u8")
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:num_rows].astype(np.bool_)

    def _words(self, dirty: Arena, shard: int) -> NDArray[np.uint64]:
        first = shard * dirty.region_rows
        words: NDArray[np.uint64] = dirty.array[first : first + dirty.region_rows, 0]
        return words

    def _new_dirty_bits(self) -> Arena:
        return Arena(
            np.uint64, num_regions=self._num_shards, width=1, region_bytes=8 * self._region_words
        )

    def _new_kept(self, rows: int) -> Arena:
        width = ROW_WORDS + self._row_words
        kept = Arena(
            np.uint64,
            num_regions=self._num_shards,
            width=width,
            region_bytes=8 * width * max(1, rows),
        )
        kept.reserve(rows)
        return kept

    def _view(self) -> SnapshotArrays:
        kept = self._kept
        return SnapshotArrays(
            dirty=self._dirty.array.reshape(-1),
            dirty_words=self._dirty.region_rows,
            snapshot_rows=self._snapshot_rows,
            copied_rows=self._copied_rows,
            kept=np.zeros((0, 0), np.uint64) if kept is None else kept.array,
            kept_rows=0 if kept is None else kept.region_rows,
            num_kept=self._num_kept,
        )


def _words_for(rows: int) -> int:
    return -(-rows // BITS_PER_WORD)
