"""Arrow record batches to blocks of rows, for all formats with named columns.

schema, columns of a file --match_columns--> FileColumns
record batch --Decoder.decode--> Columns --blocks_of--> Block | Block ...
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.jit import kernel
from ctr_model.schema import Schema
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.batching import offsets_of
from ps_worker.data.blocks.reader import Block
from ps_worker.data.columnar.column_matching import FileColumns
from ps_worker.data.columnar.column_values import (
    KeyColumn,
    KeyLists,
    numbers,
    ready_keys,
    slot_keys,
)

# The keys of a block are written column by column, so all of them should fit into the cache.
BLOCK_ROWS = 4096

_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Columns:
    """N good rows, column by column.

    Attributes:
        labels: float32[N], 0 or 1; None for rows without labels.
        numbers: float64[N] per dense column, unscaled; nan is missing.
        slots: An array of N values or lists per slot.
        are_keys: Whether slots hold keys instead of values.
        offsets: int64[N], positions of the rows in the file.
    """

    labels: NDArray[np.float32] | None
    numbers: list[NDArray[np.float64]]
    slots: list[pa.Array]
    are_keys: bool
    offsets: NDArray[np.int64]

    def key_columns(self) -> list[KeyColumn | KeyLists]:
        """Returns the keys of each slot."""
        make = ready_keys if self.are_keys else slot_keys
        return [make(array, slot) for slot, array in enumerate(self.slots, start=1)]

    def where(self, is_wanted: NDArray[np.bool_]) -> "Columns":
        """Returns the rows selected by a mask."""
        mask = pa.array(is_wanted)
        return Columns(
            labels=None if self.labels is None else self.labels[is_wanted],
            numbers=[column[is_wanted] for column in self.numbers],
            slots=[array.filter(mask) for array in self.slots],
            are_keys=self.are_keys,
            offsets=self.offsets[is_wanted],
        )


class Decoder:
    """Decodes the record batches of one split, dropping malformed rows."""

    def __init__(
        self,
        path: str,
        schema: Schema,
        columns: FileColumns,
        bad_rows: BadRows,
        place: Callable[[int], str] | None = None,
    ) -> None:
        """Takes the settings of a file.

        Args:
            path: The file.
            schema: The columns to decode.
            columns: Their columns in the file.
            bad_rows: Counts malformed rows.
            place: Formats an offset for messages; None: as a row number.
        """
        self._path = path
        self._dense = [column.name for column in schema.dense]
        self._slots = schema.slots
        self._columns = columns
        self._bad_rows = bad_rows
        self._place = place or _row_place

    def decode(self, batch: pa.RecordBatch, offsets: NDArray[np.int64]) -> Columns:
        """Returns the good rows of `batch` and counts the malformed ones.

        Args:
            batch: Has at least the columns in `FileColumns.names`.
            offsets: int64[N], positions of its rows in the file.

        Raises:
            BadRowError: Names file, row and fault of the malformed row that exceeded the limit.
        """
        label = self._columns.label
        labels = None if label is None else numbers(batch.column(label))
        dense = [numbers(batch.column(name)) for name in self._dense]
        faults = self._faults(batch, labels, dense)
        columns = Columns(
            labels=None if labels is None else labels.astype(np.float32),
            numbers=dense,
            slots=[batch.column(name) for name in self._slots],
            are_keys=self._columns.are_keys,
            offsets=offsets,
        )
        if not faults:
            return columns
        self._count(faults, offsets)
        is_good = np.ones(len(offsets), np.bool_)
        is_good[list(faults)] = False
        return columns.where(is_good)

    def _faults(
        self,
        batch: pa.RecordBatch,
        labels: NDArray[np.float64] | None,
        dense: list[NDArray[np.float64]],
    ) -> dict[int, str]:
        """Returns the first fault of each malformed row, by row."""
        faults: dict[int, str] = {}
        if labels is not None:
            for row in _rows_where((labels != 0) & (labels != 1)):
                label = shown(batch.column(self._columns.label)[row].as_py())
                faults[row] = f"the label is {label}, expected 0 or 1"
        for name, column in zip(self._dense, dense, strict=True):
            for row in _rows_where(np.isinf(column)):
                number = shown(batch.column(name)[row].as_py())
                faults.setdefault(row, f"column {name!r} is {number}, expected a finite number")
        return faults

    def _count(self, faults: dict[int, str], offsets: NDArray[np.int64]) -> None:
        for row in sorted(faults):
            place = self._place(int(offsets[row])) if self._bad_rows.is_shown else ""
            self._bad_rows.add(self._path, place, faults[row])


def blocks_of(columns: Columns, schema: Schema) -> Iterator[Block]:
    """Yields the rows in blocks of up to `BLOCK_ROWS`."""
    keys = columns.key_columns()
    for start in range(0, len(columns.offsets), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(columns.offsets))
        dense = np.empty((stop - start, len(columns.numbers)), np.float64)
        for index, column in enumerate(columns.numbers):
            dense[:, index] = column[start:stop]
        block_keys, bounds = _rows_of_keys(keys, start, stop)
        batch = Batch(
            labels=None if columns.labels is None else columns.labels[start:stop],
            dense=schema.scale_dense(dense),
            keys=block_keys,
            offsets=bounds,
            num_slots=len(keys),
        )
        yield Block(batch, int(columns.offsets[start]))


def shown(value: object) -> str:
    """Returns a value for a message: text quoted, long values truncated."""
    if value is None:
        return "missing"
    text = repr(value.decode(errors="backslashreplace") if isinstance(value, bytes) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _row_place(offset: int) -> str:
    return f"row {offset + 1}"


def _rows_where(is_true: NDArray[np.bool_]) -> list[int]:
    rows: list[int] = np.flatnonzero(is_true).tolist()
    return rows


def _rows_of_keys(
    columns: Sequence[KeyColumn | KeyLists], start: int, stop: int
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Returns keys and offsets of the rows [start, stop) in the layout of `Batch`."""
    size, num_slots = stop - start, len(columns)
    single = [column for column in columns if not isinstance(column, KeyLists)]
    if len(single) == num_slots:
        keys = np.empty((size, num_slots), np.uint64)
        for index, column in enumerate(single):
            column.write(start, stop, index, keys)
        return keys.reshape(-1), _single_offsets(num_slots)[: keys.size + 1]
    lists = [_lists(column, start, stop) for column in columns]
    lengths = np.stack([np.diff(column.bounds) for column in lists], axis=1)
    offsets = offsets_of(lengths)
    flat = np.empty(offsets[-1], np.uint64)
    for index, lists_of_slot in enumerate(lists):
        _scatter_lists(lists_of_slot.keys, lists_of_slot.bounds, index, num_slots, offsets, flat)
    return flat, offsets


@functools.lru_cache(maxsize=8)
def _single_offsets(num_slots: int) -> NDArray[np.int32]:
    """Returns offsets for slots of one key each, shared by all such blocks."""
    return np.arange(BLOCK_ROWS * num_slots + 1, dtype=np.int32)


def _lists(column: KeyColumn | KeyLists, start: int, stop: int) -> KeyLists:
    if isinstance(column, KeyLists):
        return KeyLists(column.keys, column.bounds[start : stop + 1])
    keys = np.empty((stop - start, 1), np.uint64)
    column.write(start, stop, 0, keys)
    return KeyLists(keys.reshape(-1), np.arange(stop - start + 1, dtype=np.int64))


@kernel
def _scatter_lists(
    keys: NDArray[np.uint64],
    bounds: NDArray[np.int64],
    index: int,
    num_slots: int,
    offsets: NDArray[np.int32],
    out: NDArray[np.uint64],
) -> None:
    """Writes the lists of slot `index` to their places in `out`."""
    for row in range(bounds.size - 1):
        target = offsets[row * num_slots + index]
        for position in range(bounds[row], bounds[row + 1]):
            out[target] = keys[position]
            target += 1
