"""Keys of a pass: each key of its batches becomes the number of a row, found by several threads.

    keys of batches --scatter--> by partition: keys, where they were --hash table--> rows --> where they were

A key's partition is the first bits of `mix64`. Rows are numbered by partition, and within one by first
occurrence: they do not depend on the number of threads, and a stretch of rows is of few shards.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys, mix64, probe
from ctr_ps.protos.runtime.jit import kernel, read_only

T = TypeVar("T")

PARTITION_BITS = 6
NUM_PARTITIONS = 2**PARTITION_BITS
_SHIFT = np.uint64(64 - PARTITION_BITS)
_MAX_ROWS = np.iinfo(np.int32).max >> PARTITION_BITS  # of a partition: rows are int32

PIECE_KEYS = 2**17  # keys that a thread scatters at a time
TASK_KEYS = 2**15  # fewer are not worth a thread
CHUNK_KEYS = 2**23  # keys of a pass that are scattered at once: 12 bytes of scratch memory each

Rows = NDArray[np.int32]


@kernel
def _count(keys: Keys, counts: NDArray[np.int64]) -> None:
    """Adds the number of keys in each partition to `counts` int64[NUM_PARTITIONS]."""
    for key in keys:
        counts[mix64(key) >> _SHIFT] += 1


@kernel
def _scatter(
    keys: Keys, first: int, places: NDArray[np.int64], out_keys: Keys, out_from: NDArray[np.int32]
) -> None:
    """Writes keys, and where they were, from `first` on, to `places` int64[NUM_PARTITIONS], moved on."""
    for i in range(keys.size):
        partition = mix64(keys[i]) >> _SHIFT
        place = places[partition]
        places[partition] = place + 1
        out_keys[place] = keys[i]
        out_from[place] = first + i


@kernel
def _insert(
    keys: Keys,
    origins: NDArray[np.int32],
    start: int,
    partition: int,
    slots: NDArray[np.int32],
    known: Keys,
    size: int,
    out: Rows,
) -> tuple[int, int]:
    """Writes the row of each key, from `start` on, to where it was: row in the partition, then its number.

    `known` uint64[C] has the keys of `size` rows. Stops at a key that finds it full; returns where, and the
    new size.
    """
    for i in range(start, keys.size):
        slot = probe(slots, known, keys[i])
        if slots[slot] < 0:
            if size == known.size:
                return i, size
            slots[slot] = size
            known[size] = keys[i]
            size += 1
        out[origins[i]] = (slots[slot] << PARTITION_BITS) | partition
    return keys.size, size


@kernel
def _rehash(known: Keys, size: int, slots: NDArray[np.int32]) -> None:
    slots[:] = -1
    for row in range(size):
        slots[probe(slots, known, known[row])] = row


@kernel
def _find(keys: Keys, slots: NDArray[np.int32], known: Keys, first: int, out: Rows) -> None:
    """Overwrites `out` int32[N] with `first` + the row of each key, -1 without one."""
    for i in range(keys.size):
        row = slots[probe(slots, known, keys[i])]
        out[i] = first + row if row >= 0 else -1


@kernel
def _number(rows: Rows, firsts: NDArray[np.int64]) -> None:
    """Replaces rows of partitions, as `_insert` writes them, by rows of the pass."""
    for i in range(rows.size):
        partition = rows[i] & (NUM_PARTITIONS - 1)
        rows[i] = firsts[partition] + (rows[i] >> PARTITION_BITS)


def _capacity(num_keys: int) -> int:
    return 1 << max(4, (num_keys - 1).bit_length())


class _Partition:
    """A hash table of the keys of one partition, at most half full. For one thread at a time."""

    def __init__(self, number: int, expected: int) -> None:
        """Makes room for the expected number of keys; more is made when it is needed."""
        capacity = _capacity(expected) if expected else 0
        self._number = number
        self.size = 0
        self.keys = np.empty(capacity, np.uint64)
        self.slots = np.full(2 * capacity or 1, -1, np.int32)

    def insert(self, keys: Keys, origins: NDArray[np.int32], out: Rows) -> None:
        """Writes the row of each of `keys` uint64[N] to `out` at `origins` int32[N]; see `_insert`."""
        done = 0
        while True:
            done, self.size = _insert(
                keys, origins, done, self._number, self.slots, self.keys, self.size, out
            )
            if done == keys.size:
                return
            self._grow()

    def _grow(self) -> None:
        capacity = _capacity(self.size + 1)
        if capacity > _MAX_ROWS:
            raise UsageError(
                f"a pass has over {self.size * NUM_PARTITIONS} distinct keys, more than int32 can number: "
                "lower device.pass_rows"
            )
        known, self.keys = self.keys, np.empty(capacity, np.uint64)
        self.keys[: self.size] = known[: self.size]
        self.slots = np.empty(2 * capacity, np.int32)
        _rehash(self.keys, self.size, self.slots)


@dataclass(frozen=True, slots=True, eq=False)
class PassKeys:
    """The distinct keys of a pass, uint64[R], by row. Immutable."""

    keys: Keys
    _firsts: NDArray[np.int64]  # of each partition, and R
    _partitions: Sequence[_Partition]

    def rows_of(self, other: "PassKeys", pool: ThreadPoolExecutor) -> Rows:
        """Returns the row here of each key of `other`, int32[R of other]; -1: it is not here."""
        rows = np.empty(other.keys.size, np.int32)

        def find(number: int) -> None:
            part = self._partitions[number]
            where = slice(other._firsts[number], other._firsts[number + 1])
            _find(other.keys[where], part.slots, part.keys, self._firsts[number], rows[where])

        _run(pool, find, range(NUM_PARTITIONS), other.keys.size)
        return rows


NO_KEYS = PassKeys(
    np.empty(0, np.uint64),
    np.zeros(NUM_PARTITIONS + 1, np.int64),
    [_Partition(number, 0) for number in range(NUM_PARTITIONS)],
)
"""Those of no pass."""


def pass_keys(
    columns: Sequence[Keys], pool: ThreadPoolExecutor, *, like: PassKeys | None = None
) -> tuple[PassKeys, Sequence[Rows]]:
    """Returns the distinct keys of `columns`, uint64[L] each, and the row of each key, int32[L].

    About as many are expected as in the pass `like`. Raises UsageError if they are more than int32 can
    number.
    """
    expected = (like or NO_KEYS)._partitions
    partitions = [_Partition(number, part.size) for number, part in enumerate(expected)]
    rows = [row for chunk in _chunks(columns) for row in _inserted(chunk, partitions, pool)]
    sizes = [part.size for part in partitions]
    firsts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    _run(pool, lambda column: _number(column, firsts), rows, sum(each.size for each in rows))
    keys = np.concatenate([part.keys[: part.size] for part in partitions])
    return PassKeys(keys, firsts, partitions), rows


def _chunks(columns: Sequence[Keys]) -> Iterator[Sequence[Keys]]:
    """Yields consecutive columns, of about CHUNK_KEYS together."""
    first, size = 0, 0
    for i, column in enumerate(columns):
        if size and size + column.size > CHUNK_KEYS:
            yield columns[first:i]
            first, size = i, 0
        size += column.size
    yield columns[first:]


def _inserted(
    columns: Sequence[Keys], partitions: Sequence[_Partition], pool: ThreadPoolExecutor
) -> Sequence[Rows]:
    """Inserts keys into their partitions; returns for each column what `_insert` writes."""
    ends = np.cumsum([0, *(column.size for column in columns)])
    pieces = [
        (read_only(column[start : start + PIECE_KEYS]), int(first) + start)
        for column, first in zip(columns, ends[:-1], strict=True)
        for start in range(0, column.size, PIECE_KEYS)
    ]
    counts = np.zeros((len(pieces), NUM_PARTITIONS), np.int64)
    size = int(ends[-1])
    _run(pool, lambda i: _count(pieces[i][0], counts[i]), range(len(pieces)), size)
    totals = np.concatenate([[0], np.cumsum(counts.sum(0))])
    places = totals[:-1] + np.cumsum(counts, axis=0) - counts
    keys, origins = np.empty(size, np.uint64), np.empty(size, np.int32)
    _run(pool, lambda i: _scatter(*pieces[i], places[i], keys, origins), range(len(pieces)), size)
    rows = np.empty(size, np.int32)

    def insert(number: int) -> None:
        where = slice(totals[number], totals[number + 1])
        partitions[number].insert(keys[where], origins[where], rows)

    _run(pool, insert, range(NUM_PARTITIONS), size)
    return np.split(rows, ends[1:-1])


def _run(
    pool: ThreadPoolExecutor, work: Callable[[T], None], items: Sequence[T], num_keys: int
) -> None:
    """Calls `work` with each item, which together have so many keys, in the threads of a pool.

    Raises what the first of them raises.
    """
    num_tasks = max(1, min(len(items), num_keys // TASK_KEYS))

    def some(first: int) -> None:
        for item in items[first::num_tasks]:
            work(item)

    if num_tasks == 1:
        some(0)
    else:
        for _ in pool.map(some, range(num_tasks)):
            pass
