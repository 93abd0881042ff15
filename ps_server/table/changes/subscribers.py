"""Subscribers (GEO workers) to a table's changes: a bit for each row and subscriber that has yet to take it.

    row 17 of a shard:  | word 0: subscribers 0 to 63 | word 1: subscribers 64 to 127 | ...

Subscriber w has bit w % 64 of word w // 64. A change of a row sets the bits of all subscribers except its
source; taking the row clears the bit of one. Without subscribers there are no words.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ps_server.table.memory.arena import Arena

WORD_BITS = 64
NOBODY = -1
"""Source of a change that no subscriber made."""
EVERY_SUBSCRIBER = np.uint64(2**WORD_BITS - 1)


class Subscribers:
    """The change words of a table's rows, and where each subscriber resumes. Not thread-safe.

    Address space is reserved for `rows` rows of each shard; `shards` are those of this server.
    """

    def __init__(
        self, num_subscribers: int, *, shards: Sequence[int], num_shards: int, rows: int
    ) -> None:
        num_words = -(-num_subscribers // WORD_BITS)
        self.num_subscribers = num_subscribers
        self.row_bytes = 8 * num_words
        self._shards = shards
        self._next = [(0, 0)] * num_subscribers
        self._arena: Arena | None = None
        if num_subscribers:
            self._arena = Arena(
                np.uint64,
                num_regions=num_shards,
                width=num_words,
                region_bytes=rows * self.row_bytes,
            )

    @property
    def words(self) -> NDArray[np.uint64]:
        """The words of all rows, uint64[num_shards * region_rows, W]."""
        return np.zeros((0, 0), np.uint64) if self._arena is None else self._arena.array

    @property
    def region_rows(self) -> int:
        """Rows from one shard's words to the next."""
        return 0 if self._arena is None else self._arena.region_rows

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` rows in every shard; if memory is short, changes nothing."""
        if self._arena is not None:
            self._arena.reserve(rows)

    def mark_all(self, num_rows: NDArray[np.int64]) -> None:
        """Marks the first `num_rows` int64[num_shards] rows of each shard as changed for every subscriber."""
        for shard in self._shards:
            first = shard * self.region_rows
            self.words[first : first + int(num_rows[shard])] = EVERY_SUBSCRIBER

    def release(self, shard: int, start: int, stop: int) -> None:
        """Zeroes the words of some rows, and releases their memory where possible."""
        if self._arena is not None:
            first = shard * self._arena.region_rows
            self._arena.release(first + start, first + stop)

    def stretches(
        self, subscriber: int, num_rows: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int]]:
        """Yields (shard, start, stop) for all rows, once around from where the subscriber stopped.

        `num_rows` is int64[num_shards].
        """
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
