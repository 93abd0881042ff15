"""Rows as they were at one moment, while others go on changing them.

    rows of a shard:  | copied | to be copied | made since the cut |
                      0   copied_rows     snapshot_rows

Every row has a mark: that it changed since the last cut. A cut begins without marks, so the first change of a
row is the one that finds none; if the row is still to be copied, that change keeps its old bytes first. Who
copies takes what stands in the table and puts the kept rows over it. A place keeps the bytes of the row that
stood there at the cut, wherever that row has gone since.
"""

import numpy as np
from numpy.typing import NDArray

from protos.runtime.jit import inlined_kernel
from ps_server.table.memory.arena import Arena
from ps_server.table.memory.hash_index import MARKS_A_WORD, SnapshotArrays, TableArrays
from ps_server.table.memory.intrinsics import Int, prefetch

_WORD_SHIFT = 6  # MARKS_A_WORD as a shift: a signed division costs more

ROW_WORDS = 1
"""Words of a kept row before its bytes: the number of the row in its shard."""


@inlined_kernel
def _word_of_mark(table: TableArrays, shard: Int, row_in_shard: Int) -> np.int64:
    """Returns which of `table.snapshot.marks` has the mark of a row."""
    return np.int64(shard * table.snapshot.mark_words + (row_in_shard >> _WORD_SHIFT))


@inlined_kernel
def ask_for_mark(table: TableArrays, shard: Int, row: Int) -> None:
    """Prefetches the mark of a row, a position in `table.slab`, some time before `keep_old_row`."""
    prefetch(table.snapshot.marks, _word_of_mark(table, shard, row - shard * table.region_rows))


@inlined_kernel
def keep_old_row(table: TableArrays, shard: Int, row: Int) -> None:
    """Must be called before a row, a position in `table.slab`, is changed; for a new row after it is made."""
    row_in_shard = row - shard * table.region_rows
    word = _word_of_mark(table, shard, row_in_shard)
    mark = np.uint64(1) << np.uint64(row_in_shard & (MARKS_A_WORD - 1))
    if table.snapshot.marks[word] & mark:
        return
    table.snapshot.marks[word] |= mark
    if table.snapshot.copied_rows[shard] <= row_in_shard < table.snapshot.snapshot_rows[shard]:
        place = shard * table.snapshot.kept_rows + table.snapshot.num_kept[shard]
        table.snapshot.num_kept[shard] += 1
        table.snapshot.kept[place, 0] = np.uint64(row_in_shard)
        for column in range(table.keys.shape[1]):
            table.snapshot.kept[place, ROW_WORDS + column] = table.keys[row, column]


@inlined_kernel
def keep_leaving_row(table: TableArrays, shard: Int, row: Int) -> None:
    """Must be called before a row leaves its place: it is removed, or moves elsewhere in its shard."""
    if table.snapshot.snapshot_rows[shard]:
        keep_old_row(table, shard, row)


@inlined_kernel
def move_mark(table: TableArrays, shard: Int, source: Int, target: Int) -> None:
    """Lets a row's mark go along with it, from place to place of its shard.

    Both places have been left before, so while a cut lasts both are marked, and stay so: should it fail, the
    marks from before it come back to places, and the row may have had one.
    """
    first = shard * table.region_rows
    words = shard * table.snapshot.mark_words
    old, new = source - first, target - first
    mark = (
        table.snapshot.marks[words + old // MARKS_A_WORD] >> np.uint64(old % MARKS_A_WORD)
    ) & np.uint64(1)
    place = np.uint64(new % MARKS_A_WORD)
    table.snapshot.marks[words + new // MARKS_A_WORD] &= ~(np.uint64(1) << place)
    table.snapshot.marks[words + new // MARKS_A_WORD] |= mark << place


class SnapshotRegions:
    """Marks of a table's rows, and while a cut lasts the rows that it keeps. Not thread-safe.

    Attributes:
        arrays: What kernels work on; replaced when memory moves.
    """

    def __init__(self, *, num_shards: int, rows: int, row_words: int) -> None:
        """Makes marks for regions without rows.

        Args:
            num_shards: Shards of the table.
            rows: Rows of a shard to reserve address space for.
            row_words: Width of a row, in uint64.
        """
        self._num_shards = num_shards
        self._row_words = row_words
        self._region_words = _words_for(rows)
        self._marks = self._new_marks()
        self._marks_before: Arena | None = None
        self._next_marks: Arena | None = None
        self._kept: Arena | None = None
        self._snapshot_rows = np.zeros(num_shards, np.int64)
        self._copied_rows = np.zeros(num_shards, np.int64)
        self._num_kept = np.zeros(num_shards, np.int64)
        self.arrays = self._view()

    def reserve(self, rows: int) -> None:
        """Makes room for the marks of `rows` rows in every shard; short of memory, leaves all as it was."""
        self._marks.reserve(_words_for(rows))
        self.arrays = self._view()

    def prepare(self, num_rows: NDArray[np.int64]) -> None:
        """Takes memory for the marks of the next cut, so that the first pushes after it need not.

        With that to do, the first one after a cut of 10 M rows took 5 to 14 ms. Thread-safe.
        """
        marks = self._new_marks()
        marks.reserve(_words_for(int(num_rows.max())))
        for shard, rows in enumerate(num_rows):
            self._words(marks, shard)[: _words_for(int(rows))] = 0
        self._next_marks = marks

    def begin(self, num_rows: NDArray[np.int64]) -> None:
        """Begins a cut through the first `num_rows` int64[num_shards] rows of each shard.

        Takes address space for a copy of all of them, and memory for those that change before they are
        copied. The time does not depend on the number of rows; short of memory, leaves all as it was.
        """
        most = int(num_rows.max())
        kept = self._new_kept(most)
        marks = self._next_marks or self._new_marks()
        marks.reserve(_words_for(most))
        self._next_marks = None
        self._kept, self._marks_before, self._marks = kept, self._marks, marks
        self._snapshot_rows[:] = num_rows
        self._copied_rows[:] = 0
        self._num_kept[:] = 0
        self.arrays = self._view()

    def end(self, *, saved: bool) -> None:
        """Ends the cut; unless it was saved, rows that had changed before it count as changed again."""
        before = self._marks_before
        if before is not None and not saved:
            for shard, num_rows in enumerate(self._snapshot_rows):
                words = _words_for(int(num_rows))
                self._words(self._marks, shard)[:words] |= self._words(before, shard)[:words]
        self._kept = self._marks_before = None
        self._snapshot_rows[:] = 0
        self._copied_rows[:] = 0
        self._num_kept[:] = 0
        self.arrays = self._view()

    def clear(self, num_rows: NDArray[np.int64]) -> None:
        """Takes the marks from all of int64[num_shards] rows; there is no cut."""
        marks = self._new_marks()
        marks.reserve(_words_for(int(num_rows.max())))
        self._marks = marks
        self.arrays = self._view()

    @property
    def is_in_snapshot(self) -> bool:
        """Whether a cut has begun and not ended."""
        return self._marks_before is not None

    def kept_rows(self, shard: int) -> NDArray[np.uint64]:
        """Returns the rows of a shard kept so far, uint64[N, ROW_WORDS + row_words]: number, bytes."""
        first = shard * self.arrays.kept_rows
        return self.arrays.kept[first : first + int(self._num_kept[shard])]

    def advance(self, shard: int, copied_rows: int) -> None:
        """Says that the first rows of a shard have been copied: no more of them are kept."""
        self._copied_rows[shard] = copied_rows

    def release(self, shard: int) -> None:
        """Gives back the memory of a shard's kept rows; all its rows have been copied."""
        if self._kept is not None:
            first = shard * self._kept.region_rows
            self._kept.release(first, first + int(self._num_kept[shard]))

    def changed_before(self, shard: int) -> NDArray[np.bool_]:
        """Returns which rows of a shard at the cut had changed since the one before, bool[N]."""
        marks = self._marks if self._marks_before is None else self._marks_before
        return _bits(self._words(marks, shard), int(self._snapshot_rows[shard]))

    def _words(self, marks: Arena, shard: int) -> NDArray[np.uint64]:
        first = shard * marks.region_rows
        words: NDArray[np.uint64] = marks.array[first : first + marks.region_rows, 0]
        return words

    def _new_marks(self) -> Arena:
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
            marks=self._marks.array.reshape(-1),
            mark_words=self._marks.region_rows,
            snapshot_rows=self._snapshot_rows,
            copied_rows=self._copied_rows,
            kept=np.zeros((0, 0), np.uint64) if kept is None else kept.array,
            kept_rows=0 if kept is None else kept.region_rows,
            num_kept=self._num_kept,
        )


def _words_for(rows: int) -> int:
    return -(-rows // MARKS_A_WORD)


def _bits(words: NDArray[np.uint64], number: int) -> NDArray[np.bool_]:
    """Returns the first bits of words, bool[number]."""
    bytes_of_words = words[: _words_for(number)].astype("<u8").view(np.uint8)
    return np.unpackbits(bytes_of_words, bitorder="little")[:number].astype(np.bool_)
