"""Arrow record batches to blocks of rows, for all formats with named columns.

record batch --Decoder.decode--> Columns --blocks_of--> Block | Block ...
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, offsets_of, without_rows
from ctr_ps.ps_worker.data.columnar.column_matching import check_types, match_columns
from ctr_ps.ps_worker.data.columnar.column_values import (
    KeyColumn,
    KeyLists,
    flat,
    group_keys,
    numbers,
    ready_keys,
    slot_keys,
    split_texts,
    texts,
    times_in,
    with_times,
    without_views,
    written,
)
from ctr_ps.ps_worker.data.files.file_split import FileSplit

# The keys of a block are written column by column, so all of them should fit into the cache.
BLOCK_ROWS = 4096

_MAX_SHOWN = 60

_SEPARATORS = frozenset("\t\n\r")  # of predictions with ids


@dataclass(frozen=True, slots=True)
class Columns:
    """N good rows, column by column."""

    row_columns: Mapping[str, NDArray[Any]]  # by name, those of `ROW_COLUMNS` that the rows have
    numbers: list[NDArray[np.float64]]  # float64[N] per dense column, unscaled; nan is missing
    slots: list[pa.Array]  # an array of N values or lists per slot
    are_keys: bool  # whether slots hold keys instead of values
    offsets: NDArray[np.int64]  # int64[N], positions of the rows in the file
    # counts malformed rows, given their faults by index and their offsets
    count_bad: Callable[[Mapping[int, str], NDArray[np.int64]], None]

    def key_columns(self, slot_numbers: Sequence[int]) -> list[KeyColumn | KeyLists]:
        """Returns the keys of each slot, by the slots' numbers in the feature hash."""
        make = ready_keys if self.are_keys else slot_keys
        return [make(*each) for each in zip(self.slots, slot_numbers, strict=True)]

    def where(self, is_wanted: NDArray[np.bool_]) -> "Columns":
        """Returns the rows selected by a mask."""
        mask = pa.array(is_wanted)
        return replace(
            self,
            row_columns={name: column[is_wanted] for name, column in self.row_columns.items()},
            numbers=[column[is_wanted] for column in self.numbers],
            slots=[array.filter(mask) for array in self.slots],
            offsets=self.offsets[is_wanted],
        )

    def without(self, faults: Mapping[int, str]) -> "Columns":
        """Returns the rows without a fault, by index; the others are counted as malformed."""
        if not faults:
            return self
        self.count_bad(faults, self.offsets)
        is_good = np.ones(len(self.offsets), np.bool_)
        is_good[list(faults)] = False
        return self.where(is_good)


class Decoder:
    """Decodes the record batches of one split, dropping malformed rows."""

    def __init__(
        self,
        path: str,
        fields: pa.Schema,
        schema: Schema,
        bad_rows: BadRows,
        place: Callable[[int], str] | None = None,
    ) -> None:
        """Takes the columns of a file; `place` formats an offset of text for messages.

        Without it the offset is a row number, and types are those of the values, to be checked. Raises a
        DataError that names a missing or ambiguous column, or one of another type.
        """
        fields = flat(fields, schema.vectors)
        self.times = times_in((*schema.features, *schema.labels), fields)
        self.fields = with_times(fields, self.times)
        self.columns = columns = match_columns(path, self.fields, schema, self.times)
        if place is None:
            check_types(path, self.fields, schema, columns)
        self._vectors = schema.vectors
        self._path = path
        self._dense = [column.name for column in schema.dense]
        self._slots = schema.slots
        self._split = {} if columns.are_keys else schema.split
        self._bad_rows = bad_rows
        self._place = place or (lambda offset: f"row {offset + 1}")

    def decode(self, batch: pa.RecordBatch, offsets: NDArray[np.int64]) -> Columns:
        """Returns the good rows of `batch`, at positions `offsets` int64[N], and counts malformed ones."""
        batch = flat(batch, self._vectors)
        batch = pa.RecordBatch.from_arrays(
            [without_views(column) for column in batch.columns], names=batch.schema.names
        )
        batch = with_times(batch, self.times)
        named = {
            key: _READ[key](batch.column(name)) for key, name in self.columns.row_columns.items()
        }
        others = [numbers(batch.column(name)) for name in self.columns.other_labels]
        dense = [numbers(batch.column(name)) for name in self._dense]
        faults = self._faults(batch, named, others, dense)
        row_columns = {
            key: _float32_of(column) if column.dtype == np.float64 else column
            for key, column in named.items()
        }
        if others:
            row_columns["other_labels"] = _float32_of(np.stack(others, axis=1))
        split = self._split
        columns = Columns(
            row_columns=row_columns,
            numbers=dense,
            slots=[split_texts(batch.column(name), split.get(name)) for name in self._slots],
            are_keys=self.columns.are_keys,
            offsets=offsets,
            count_bad=self._count,
        )
        return columns.without(faults)

    def decode_good(
        self, batch: pa.RecordBatch, offsets: NDArray[np.int64], faults: Mapping[int, str]
    ) -> Iterator[Columns]:
        """Yields the good rows, if any, of those without a known fault, by index; counts malformed ones."""
        self._count(faults, offsets)
        is_good = ~np.isin(np.arange(len(offsets)), list(faults))
        if is_good.any():
            batch = batch.filter(pa.array(is_good)) if faults else batch
            yield self.decode(batch, offsets[is_good])

    def _faults(
        self,
        batch: pa.RecordBatch,
        named: Mapping[str, NDArray[Any]],
        others: list[NDArray[np.float64]],
        dense: list[NDArray[np.float64]],
    ) -> dict[int, str]:
        """Returns the first fault of each malformed row, by row."""
        checks: list[tuple[str, NDArray[Any], _IsFault, str, str]] = []
        for name, source in self.times.items():
            part = batch.column(name).fill_null(0).to_numpy()
            expected = "a number" if ">" in name else "a time: 2026-11-28T13:05:00Z"
            checks.append((source, part, _is_negative, f"column {source!r}", expected))
        checks += [
            (name, named[key], _FAULTS[key][0], f"the {_FAULTS[key][1]}", _FAULTS[key][2])
            for key, name in self.columns.row_columns.items()
            if key in _FAULTS
        ]
        for name, column in zip(self.columns.other_labels, others, strict=True):
            checks.append((name, column, _is_no_label, f"the label {name!r}", "0 or 1"))
        for name, column in zip(self._dense, dense, strict=True):
            checks.append((name, column, np.isinf, f"column {name!r}", "a finite number"))
        faults: dict[int, str] = {}
        for name, column, is_fault, what, expected in checks:
            for row in np.flatnonzero(is_fault(column)).tolist():
                value = shown(batch.column(name)[row].as_py())
                faults.setdefault(row, f"{what} is {value}, expected {expected}")
        for name in self._vectors.keys() & batch.schema.names if faults else ():
            for row, found in ((row, batch.column(name)[row].as_py()) for row in faults):
                if isinstance(found, list) and len(found) != (width := self._vectors[name]):
                    faults[row] = (
                        f"column {name!r} is a list of {len(found)} numbers, expected {width}"
                    )
        return faults

    def _count(self, faults: Mapping[int, str], offsets: NDArray[np.int64]) -> None:
        for row, fault in sorted(faults.items()):
            place = functools.partial(self._place, int(offsets[row]))
            self._bad_rows.add(self._path, place, fault)


def blocks_of(columns: Columns, schema: Schema) -> Iterator[Block]:
    """Yields the rows in blocks of up to `BLOCK_ROWS`."""
    keys = columns.key_columns(schema.slot_numbers)
    for start in range(0, len(columns.offsets), BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, len(columns.offsets))
        dense = np.empty((stop - start, len(columns.numbers)), np.float64)
        for index, column in enumerate(columns.numbers):
            dense[:, index] = column[start:stop]
        block_keys, bounds = _rows_of_keys(keys, start, stop)
        batch = Batch(
            **{name: column[start:stop] for name, column in columns.row_columns.items()},
            dense=schema.scale_dense(dense),
            keys=block_keys,
            offsets=bounds,
            num_slots=len(keys),
        )
        offsets = columns.offsets[start:stop]
        if faults := schema.overflows(dense, batch.dense):
            columns.count_bad(faults, offsets)
            batch, offsets = without_rows(batch, offsets, faults)
        if batch.size:
            yield Block(batch, int(columns.offsets[start]), offsets)


class ColumnReader(ABC):
    """A `Reader` of files with named columns, found by the names in the schema. Thread-safe."""

    def __init__(self, schema: Schema, bad_rows: BadRows) -> None:
        self._schema = schema
        self._bad_rows = bad_rows

    def blocks(self, split: FileSplit, offset: int | None = None) -> Iterator[Block]:
        for columns in self.columns(split, offset):
            yield from blocks_of(columns, self._schema)

    @abstractmethod
    def fields(self, path: str) -> pa.Schema:
        """Returns the columns of a file, in its order; raises DataError if they cannot be read."""

    @abstractmethod
    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        """Yields the rows of a split as columns; arguments and errors as for `Reader.blocks`."""


def _float32_of(column: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # of rows that are malformed, and left out
        return column.astype(np.float32)


def _is_no_label(labels: NDArray[np.float64]) -> NDArray[np.bool_]:
    is_fault: NDArray[np.bool_] = (labels != 0) & (labels != 1)
    return is_fault


def _is_negative(part: NDArray[np.int64]) -> NDArray[np.bool_]:
    return part < 0


def _is_no_weight(weights: NDArray[np.float64]) -> NDArray[np.bool_]:
    return ~((weights >= 0) & (weights <= np.finfo(np.float32).max))


def _is_no_id(ids: NDArray[np.object_]) -> NDArray[np.bool_]:
    return np.array([value is None or not _SEPARATORS.isdisjoint(value) for value in ids], np.bool_)


_READ: Mapping[str, Callable[[pa.Array], NDArray[Any]]] = {
    "labels": numbers,
    "weights": numbers,
    "ids": texts,
    "groups": group_keys,
}
"""Functions that read the columns of `ROW_COLUMNS`."""

_IsFault = Callable[[Any], NDArray[np.bool_]]
_FAULTS: Mapping[str, tuple[_IsFault, str, str]] = {
    "labels": (_is_no_label, "label", "0 or 1"),
    "weights": (_is_no_weight, "weight", "a finite number of at least 0"),
    "ids": (_is_no_id, "id", "UTF-8 without tabs and line breaks"),
}
"""Test for invalid values, name and valid values of the columns of `ROW_COLUMNS`; any value names a group."""


def shown(value: object) -> str:
    """Returns a value for a message: text quoted, long values truncated."""
    if value is None:
        return "missing"
    text = repr(value.decode(errors="backslashreplace") if isinstance(value, bytes) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _rows_of_keys(
    columns: Sequence[KeyColumn | KeyLists], start: int, stop: int
) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Returns keys and offsets of the rows [start, stop) in the layout of `Batch`."""
    size, num_slots = stop - start, len(columns)
    single = [column for column in columns if not isinstance(column, KeyLists)]
    if len(single) == num_slots:
        keys = np.empty((size, num_slots), np.uint64)
        for index, column in enumerate(single):
            column(start, stop, index, keys)
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
    return np.arange(BLOCK_ROWS * num_slots + 1, dtype=np.int32)


def _lists(column: KeyColumn | KeyLists, start: int, stop: int) -> KeyLists:
    if isinstance(column, KeyLists):
        return KeyLists(column.keys, column.bounds[start : stop + 1])
    return KeyLists(written(column, start, stop), np.arange(stop - start + 1, dtype=np.int64))


@kernel
def _scatter_lists(
    keys: NDArray[np.uint64],
    bounds: NDArray[np.int64],
    index: int,
    num_slots: int,
    offsets: NDArray[np.int32],
    out: NDArray[np.uint64],
) -> None:
    for row in range(bounds.size - 1):
        target = offsets[row * num_slots + index]
        for position in range(bounds[row], bounds[row + 1]):
            out[target] = keys[position]
            target += 1
