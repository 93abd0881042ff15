"""Changes of a table: dirty rows with their copy-on-write, subscribers, tombstones.

Dirty rows changed since the last snapshot; a delta has them. A snapshot begins with clean rows, so the first
change of a row finds its bit clear; if the row is still to be copied, that change first keeps the old row:

    rows of a shard:  | copied | to be copied | inserted since the snapshot |
                      0   copied_rows     snapshot_rows

The copy reads rows from the table, then overwrites them with the kept ones. A kept row belongs to the
position that it had at the snapshot, wherever the row is now.

Subscribers (GEO workers) have a bit in each row that they have yet to take. A change sets the bits of all
except its source; taking the row clears one. Subscriber w has bit w % 8 of byte w // 8:

    row 17 of a shard:  | byte 0: subscribers 0 to 7 | byte 1: subscribers 8 to 15 | ...

The bit after theirs is for a move of shards to another server, which takes changes likewise.

Tombstones are keys whose row was removed since the last snapshot, and the passes that ended since:

    snapshot ---- removed keys, passes ----> snapshot, saved: starts empty
                                             not saved: the earlier ones are restored
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import UnknownChangesError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import inlined_kernel
from ctr_ps.ps_server.table.memory.arena import Arena
from ctr_ps.ps_server.table.memory.hash_index import BITS_PER_WORD, SnapshotArrays, TableArrays
from ctr_ps.ps_server.table.memory.intrinsics import Int, prefetch

_WORD_SHIFT = 6  # BITS_PER_WORD as a shift: a signed division costs more

ROW_WORDS = 1
"""Words of a kept row before its bytes: the row's position in its shard."""

BYTE_BITS = 8
NOBODY = -1
"""Source of a change that no subscriber made."""
EVERY_SUBSCRIBER = np.uint8(2**BYTE_BITS - 1)

LEAST_LIMIT = 4096  # removed keys that are recorded for a shard even if it has fewer rows

MAX_PASSES = 10_000
"""Passes that a delta may have, each of which its readers repeat; a full checkpoint has no limit."""


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
    """Dirty bits of a table's rows and, in a snapshot, old versions of rows. Not thread-safe."""

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
        """Allocates the dirty bits of the next snapshot; a push would wait for it 5 to 14 ms. Thread-safe."""
        dirty = self._new_dirty_bits()
        dirty.reserve(_words_for(int(num_rows.max())))
        for shard, rows in enumerate(num_rows):
            self._words(dirty, shard)[: _words_for(int(rows))] = 0
        self._next_dirty = dirty

    def begin(self, num_rows: NDArray[np.int64]) -> None:
        """Begins a snapshot of the first `num_rows` int64[num_shards] rows of each shard, in constant time.

        Takes address space for a copy of all of them, and memory for those that change before they are
        copied. If memory is short, changes nothing.
        """
        most = int(num_rows.max())
        width = ROW_WORDS + self._row_words
        region_bytes = 8 * width * max(1, most)
        kept = Arena(
            np.uint64, num_regions=self._num_shards, width=width, region_bytes=region_bytes
        )
        kept.reserve(most)
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


class Subscribers:
    """Change bytes of the rows of `shards`, at most `rows` of each, and where each subscriber resumes.

    With subscribers, or for a move, there is a bit more, which is the move's.
    """

    def __init__(
        self,
        num_subscribers: int,
        *,
        shards: Sequence[int],
        num_shards: int,
        rows: int,
        moves: bool = False,
    ) -> None:
        self.row_bytes = -(-(num_subscribers + 1) // BYTE_BITS) if num_subscribers or moves else 0
        self.num_subscribers = num_subscribers
        self._shards = shards
        self._next = [(0, 0)] * num_subscribers
        self._arena: Arena | None = None
        if self.row_bytes:
            self._arena = Arena(
                np.uint8,
                num_regions=num_shards,
                width=self.row_bytes,
                region_bytes=rows * self.row_bytes,
            )

    @property
    def marks(self) -> NDArray[np.uint8]:
        """The bytes of all rows, uint8[num_shards * region_rows, B]."""
        return np.zeros((0, 0), np.uint8) if self._arena is None else self._arena.array

    @property
    def region_rows(self) -> int:
        """Rows from one shard's bytes to the next."""
        return 0 if self._arena is None else self._arena.region_rows

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows in every shard; if memory is short, changes nothing."""
        if self._arena is not None:
            self._arena.reserve(rows)

    def mark_all(self, num_rows: NDArray[np.int64]) -> None:
        """Marks the first `num_rows` int64[num_shards] rows of each shard as changed for every subscriber."""
        for shard in self._shards:
            first = shard * self.region_rows
            self.marks[first : first + int(num_rows[shard])] = EVERY_SUBSCRIBER

    def mark_for_move(self, shard: int, num_rows: int) -> None:
        """Marks the first rows of a shard as changed for the move; there must be bytes."""
        byte, bit = divmod(self.num_subscribers, BYTE_BITS)
        first = shard * self.region_rows
        self.marks[first : first + num_rows, byte] |= np.uint8(1 << bit)

    def place(self, shards: Sequence[int]) -> None:
        """The table has other shards now."""
        self._shards = shards
        self._next = [(0, 0)] * self.num_subscribers

    def release(self, shard: int, start: int, stop: int) -> None:
        """Zeroes the bytes of some rows, and releases their memory where possible."""
        if self._arena is not None:
            first = shard * self._arena.region_rows
            self._arena.release(first + start, first + stop)

    def stretches(
        self, subscriber: int, num_rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int]]:
        """Yields (shard, start, stop) for all rows, once around from where the subscriber stopped."""
        first, row = self._next[subscriber]
        around = [*self._shards[first:], *self._shards[: first + 1]]  # the first in two parts
        for i, shard in enumerate(around):
            yield (
                shard,
                row if i == 0 else 0,
                row if i == len(self._shards) else int(num_rows[shard]),
            )

    def stop_at(self, subscriber: int, shard: int, row: int) -> None:
        """Records the shard and row at which the subscriber resumes."""
        self._next[subscriber] = (self._shards.index(shard), row)


@dataclass(slots=True)
class _Changes:
    """Removals and passes between two snapshots; `is_known` is false if some may be missing."""

    is_known: bool
    passes: int = 0
    removed: dict[int, list[Keys]] = field(default_factory=dict)


class Tombstones:
    """Removed keys and passes, from the first snapshot on. Not thread-safe: a table locks its shards."""

    def __init__(self) -> None:
        self._now = _Changes(is_known=False)
        self._before: _Changes | None = None

    def require_known(self, table: str) -> None:
        """Raises UnknownChangesError if changes since the last snapshot are unknown; `table` is for it."""
        if not self._now.is_known:
            raise UnknownChangesError(
                f"the changes of table {table!r} since the last checkpoint are unknown: since then it was "
                f"created, declared with another spec, shrunk more than {MAX_PASSES} times, or lost more "
                "rows than it has; save a full checkpoint"
            )

    @property
    def passes(self) -> int:
        """Passes between the last snapshot and the current one."""
        return 0 if self._before is None else self._before.passes

    def removed_keys(self, shard: int) -> Keys:
        """Returns the keys of a shard removed between the two, uint64[N] ascending."""
        removed = {} if self._before is None else self._before.removed
        return np.unique(np.concatenate([np.empty(0, np.uint64), *removed.get(shard, [])]))

    def add_removed(self, shard: int, keys: Keys, num_rows: int) -> None:
        """Records removed keys uint64[N] of a shard of `num_rows` rows; more keys than rows: forgets all."""
        if not self._now.is_known:
            return
        listed = self._now.removed.setdefault(shard, [])
        listed.append(keys)
        if sum(each.size for each in listed) > max(LEAST_LIMIT, num_rows):
            self.forget()

    def add_pass(self) -> None:
        """Records the end of a pass, in which all rows aged; after too many, all is forgotten."""
        self._now.passes += 1
        if self._now.passes > MAX_PASSES:
            self.forget()

    def forget(self) -> None:
        """Forgets all, and records nothing until the next snapshot."""
        self._now = _Changes(is_known=False)

    def restart(self) -> None:
        """Starts empty: the table is as in a checkpoint."""
        self._now = _Changes(is_known=True)

    def begin_snapshot(self) -> None:
        """Starts empty; what was recorded so far can be read until the snapshot ends."""
        self._before = self._now
        self.restart()

    def end_snapshot(self, *, saved: bool) -> None:
        """Ends the snapshot; unless it was saved, restores what was recorded before it."""
        before, self._before = self._before, None
        if before is None or saved:
            return
        if not (before.is_known and self._now.is_known):
            self.forget()
            return
        self._now.passes += before.passes
        if self._now.passes > MAX_PASSES:
            self.forget()
            return
        for shard, keys in before.removed.items():
            self._now.removed.setdefault(shard, []).extend(keys)
