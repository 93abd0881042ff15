"""Columnar storage of rows in memory, which grows without copying.

    labels  float32[N]              absent if the data has none, as are
    other_labels float32[N, T - 1]
    weights float32[N]
    dense   float32[N, num_dense]
    keys    uint64[L]               by row, then slot: uint64[N, S] if each slot has one key
    starts  int64[N]                | only if some slot has not exactly one key:
    counts  uint16[N, S]            | start of a row's keys, and the number of keys per slot

Rows arrive concurrently from numbered sources: file splits or workers. Their index depends on timing;
`in_order` sorts them by source and arrival within the source.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import ROW_COLUMNS, Batch
from ctr_ps.protos.errors import DataError
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.ps_server.table.memory.arena import Arena
from ctr_ps.ps_worker.data.blocks import offsets_of

Index = NDArray[np.integer[Any]]
"""Row indices."""

STORED_COLUMNS = tuple(name for name in ROW_COLUMNS if name not in ("ids", "groups"))
"""The `ROW_COLUMNS` of training, float32 each."""

MAX_KEYS = 2**16 - 1  # the largest number of keys of a slot of a row

_REGION_BYTES = 2**40  # address space of a column, more than the memory of any machine


@dataclass(frozen=True, slots=True)
class SlotSwap:
    """A permutation of the values of some slots."""

    donors: Index  # int[N], for each row the source of its values
    is_swapped: NDArray[np.bool_]  # bool[S], the permuted slots


class RowsInMemory:
    """Columns of rows. Only `extend` is thread-safe."""

    def __init__(self, num_dense: int, num_slots: int) -> None:
        self.num_dense = num_dense  # width of `dense`
        self.num_slots = num_slots  # S
        self.size = 0  # N
        # those of `STORED_COLUMNS` that the rows have; None without rows
        self.row_columns: frozenset[str] | None = None
        self.are_released = False  # whether rows were released, and must no longer be read
        self._num_keys = 0
        self._keys_width = max(1, num_slots)
        # of float32: "dense", and `row_columns`
        self._floats = {"dense": _column(np.float32, num_dense)}
        self._widths = {"dense": num_dense}
        self._keys = _column(np.uint64, num_slots)
        self._starts: Arena | None = None
        self._counts: Arena | None = None
        self._offsets = np.zeros(1, np.int32)
        self._segments: list[tuple[int, int, int]] = []  # source, first row, after its last row
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Size of all rows in bytes."""
        widths = self._fixed_bytes
        widths += 0 if self._starts is None else 8 + 2 * self.num_slots
        return self.size * widths + 8 * self._num_keys

    def extend(self, rows: Batch, source: int) -> None:
        """Appends rows of a source, or none on an error.

        Raises DataError if rows with and without a column are mixed, or a slot has more than `MAX_KEYS` keys.
        """
        columns = {"dense": rows.dense, **stored_columns(rows)}
        counts = None if has_one_key_a_slot(rows) else _counts_of(rows)
        with self._lock:
            if self.row_columns is None:
                self.row_columns = frozenset(columns.keys() - {"dense"})
                self._widths = {
                    name: column.shape[1] if column.ndim == 2 else 1
                    for name, column in columns.items()
                }
                for name in self.row_columns:
                    self._floats[name] = _column(np.float32, self._widths[name])
            for name in sorted(self._widths.keys() ^ columns.keys()):
                raise DataError(f"some rows have {name} and others have none: read them separately")
            start, stop = self.size, self.size + rows.size
            self._write_keys(rows, counts)
            for name, column in columns.items():
                _write(self._floats[name], start, column if column.ndim == 2 else column[:, None])
            self.size = stop
            self._num_keys += len(rows.keys)
            if self._segments and self._segments[-1][0] == source:
                start = self._segments.pop()[1]
            self._segments.append((source, start, stop))

    def in_order(self) -> Index:
        """Returns int[N], the indices of all rows, by source and then in order of arrival."""
        out: Index = np.empty(self.size, np.uint32 if self.size <= 2**32 else np.int64)
        filled = 0
        for _, start, stop in sorted(self._segments):
            out[filled : filled + stop - start] = np.arange(start, stop, dtype=out.dtype)
            filled += stop - start
        return out

    def gather(self, index: Index, swap: SlotSwap | None = None) -> Batch:
        """Returns copies of rows in the order of `index`, int[B]."""
        # With mode="clip" numpy omits a copy; all indices are valid.
        columns: dict[str, NDArray[Any]] = {
            name: np.take(self._stored(name), index, axis=0, mode="clip") for name in self._floats
        }
        if self._starts is None or self._counts is None:
            keys, offsets = self._gather_single(index, swap), self._single_offsets(len(index))
        else:
            keys, offsets = self._gather_lists(index, swap, self._starts, self._counts)
        return Batch(**columns, keys=keys, offsets=offsets, num_slots=self.num_slots)

    def bytes_of(self, index: Index) -> NDArray[np.int64]:
        """Returns int64[B], the size of each row in bytes."""
        widths = self._fixed_bytes
        if self._counts is None:
            return np.full(len(index), widths + 8 * self.num_slots, np.int64)
        counts = np.take(self._counts.array[:, : self.num_slots], index, axis=0, mode="clip")
        num_keys: NDArray[np.int64] = counts.sum(axis=1, dtype=np.int64)
        return widths + 2 * self.num_slots + 8 * num_keys

    def release(self, index: Index) -> None:
        """Returns the memory pages of rows to the system; these rows must no longer be read."""
        self.are_released = True
        for run in np.split(index, np.flatnonzero(np.diff(index.astype(np.int64)) != 1) + 1):
            if not run.size:
                continue
            start, stop = int(run[0]), int(run[-1]) + 1
            first, last = self._keys_between(start, stop)
            for column in self._floats.values():
                column.release(start, stop)
            self._keys.release(-(-first // self._keys_width), last // self._keys_width)

    @property
    def _fixed_bytes(self) -> int:
        return 4 * sum(self._widths.values())

    def _stored(self, name: str) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self._floats[name].array
        has_two_axes = name in ("dense", "other_labels")
        return array[:, : self._widths[name]] if has_two_axes else array[:, 0]

    def _keys_between(self, start: int, stop: int) -> tuple[int, int]:
        if self._starts is None:
            return start * self.num_slots, stop * self.num_slots
        first = int(self._starts.array[start, 0])
        last = int(self._starts.array[stop, 0]) if stop < self.size else self._num_keys
        return first, last

    def _write_keys(self, rows: Batch, counts: NDArray[np.uint16] | None) -> None:
        if counts is not None and self._counts is None:
            self._begin_lists()
        stop = self._num_keys + len(rows.keys)
        self._keys.reserve(-(-stop // self._keys_width))
        self._keys.array.reshape(-1)[self._num_keys : stop] = rows.keys
        if self._starts is not None and self._counts is not None:
            if counts is None:
                counts = np.ones((rows.size, self.num_slots), np.uint16)
            sizes = counts.sum(axis=1, dtype=np.int64)
            _write(self._counts, self.size, counts)
            _write(self._starts, self.size, (self._num_keys + np.cumsum(sizes) - sizes)[:, None])

    def _begin_lists(self) -> None:
        """Creates `starts` and `counts` for the rows so far, whose slots have one key each."""
        self._starts, self._counts = _column(np.int64, 1), _column(np.uint16, self.num_slots)
        starts = np.arange(self.size, dtype=np.int64) * self.num_slots
        _write(self._starts, 0, starts[:, None])
        self._counts.reserve(self.size)
        self._counts.array[: self.size] = 1

    def _gather_single(self, index: Index, swap: SlotSwap | None) -> NDArray[np.uint64]:
        rows = self._keys.array[:, : self.num_slots]
        keys = np.take(rows, index, axis=0, mode="clip")
        if swap is not None:
            donors = swap.donors[index]
            for slot in np.flatnonzero(swap.is_swapped):
                keys[:, slot] = rows[donors, slot]
        return keys.reshape(-1)

    def _single_offsets(self, size: int) -> NDArray[np.int32]:
        length = size * self.num_slots + 1
        if len(self._offsets) < length:
            self._offsets = np.arange(length, dtype=np.int32)
        return self._offsets[:length]

    def _gather_lists(
        self, index: Index, swap: SlotSwap | None, starts: Arena, counts: Arena
    ) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        donors, is_swapped = index, np.zeros(self.num_slots, np.bool_)
        if swap is not None:
            donors, is_swapped = swap.donors[index], swap.is_swapped
        lengths = np.empty((len(index), self.num_slots), np.int32)
        gather_counts(index, donors, is_swapped, counts.array, lengths)
        offsets = offsets_of(lengths)
        keys = np.empty(offsets[-1], np.uint64)
        columns = starts.array.reshape(-1), counts.array, self._keys.array.reshape(-1)
        gather_lists(index, donors, is_swapped, *columns, keys)
        return keys, offsets


def stored_columns(rows: Batch) -> dict[str, NDArray[np.float32]]:
    """Returns the `STORED_COLUMNS` of rows, by name."""
    return {name: column for name, column in rows.row_columns().items() if name in STORED_COLUMNS}


def has_one_key_a_slot(rows: Batch) -> bool:
    """Whether each slot of each row has exactly one key."""
    length = rows.size * rows.num_slots
    return len(rows.keys) == length and np.array_equal(
        rows.offsets, np.arange(length + 1, dtype=np.int32)
    )


def _counts_of(rows: Batch) -> NDArray[np.uint16]:
    """Returns uint16[B, S], the number of keys of each slot."""
    counts = np.diff(rows.offsets)
    if counts.size and counts.max() > MAX_KEYS:
        slot = int(counts.argmax()) % rows.num_slots + 1
        raise DataError(
            f"slot {slot} of a row has {counts.max()} values, but rows in memory hold up to {MAX_KEYS}: "
            "truncate such lists, or set data.in_memory = false"
        )
    return counts.astype(np.uint16).reshape(rows.size, rows.num_slots)


def _column(dtype: type[np.generic], width: int) -> Arena:
    return Arena(dtype, num_regions=1, width=max(1, width), region_bytes=_REGION_BYTES)


def _write(column: Arena, start: int, values: NDArray[Any]) -> None:
    column.reserve(start + len(values))
    column.array[start : start + len(values), : values.shape[1]] = values


@kernel
def gather_counts(
    index: Index,
    donors: Index,
    is_swapped: NDArray[np.bool_],
    counts: NDArray[np.uint16],
    out: NDArray[np.int32],
) -> None:
    """Writes the number of keys of each slot to int32[B, S]; swapped slots have those of their donors."""
    for b in range(index.size):
        for slot in range(is_swapped.size):
            row = donors[b] if is_swapped[slot] else index[b]
            out[b, slot] = counts[row, slot]


@kernel
def gather_lists(
    index: Index,
    donors: Index,
    is_swapped: NDArray[np.bool_],
    starts: NDArray[np.int64],
    counts: NDArray[np.uint16],
    keys: NDArray[np.uint64],
    out: NDArray[np.uint64],
) -> None:
    """Writes the keys of rows by row and slot; swapped slots have those of their donors."""
    filled = 0
    for b in range(index.size):
        own, given = starts[index[b]], starts[donors[b]]
        for slot in range(is_swapped.size):
            num_own, num_given = counts[index[b], slot], counts[donors[b], slot]
            first, number = (given, num_given) if is_swapped[slot] else (own, num_own)
            for i in range(number):
                out[filled + i] = keys[first + i]
            filled += number
            own += num_own
            given += num_given
