"""The values of a slot in files, each once with its key: hashes cannot be inverted, but data can be hashed.

Memory holds 16 bytes for each distinct value: its key, and a second hash by which two values of one key are
told apart.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import MAX_SLOT
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_values import (
    KeyLists,
    is_list_type,
    is_text_type,
    slot_keys,
    written,
)
from ctr_ps.ps_worker.data.columns import columns_of, slots_only

Keys = NDArray[np.uint64]


class DistinctValues:
    """The distinct values of one slot in files, in one pass. For one thread."""

    def __init__(
        self,
        files: Sequence[str],
        schema: Schema,
        slot: str,
        *,
        format: str | None = None,
        bad_rows: BadRows,
    ) -> None:
        """Takes the settings, opens no file; `format` None: by a file's suffix.

        `schema` gives the slot its number, and files in Criteo's layout their columns; SchemaError if it has
        no such slot.
        """
        self.rows = 0  # read so far
        self.distinct = 0  # distinct keys so far
        self.collisions = 0  # values so far whose key an earlier one has, too; not yielded
        self._files = files
        self._number = schema.slot_numbers[schema.slot_index(slot)]
        self._slot = slot
        self._schema = schema
        self._format = format
        self._bad_rows = bad_rows
        self._seen = _Seen()

    def __iter__(self) -> Iterator[tuple[pa.Array, Keys]]:
        """Yields values that are new, as an array of bytes, with their keys uint64[n].

        Raises UsageError if a file holds keys instead of values, and as `columns_of`.
        """
        only = slots_only([self._slot], self._schema.split)
        for path in self._files:
            for columns in columns_of(
                path, only, self._bad_rows, format=self._format, layout=self._schema
            ):
                if columns.are_keys:
                    raise UsageError(
                        f"{path}: the file has the keys of slot {self._slot!r}, not its values: give the "
                        "files from which this file was converted"
                    )
                self.rows += len(columns.offsets)
                values = distinct_values(columns.slots[0])
                keys = keys_of(values, self._number)
                # Values that collide in one slot do not in another.
                other = MAX_SLOT if self._number != MAX_SLOT else 1
                is_new = self._seen.add(keys, keys_of(values, other))
                self.collisions = len(self._seen.collided)
                self.distinct += int(np.count_nonzero(is_new))
                if is_new.any():
                    yield values.filter(pa.array(is_new)), keys[is_new]


def keys_of(values: pa.Array, slot: int) -> Keys:
    """Returns the keys uint64[n] of values, bytes, in slot number `slot`."""
    column = slot_keys(values, slot)
    assert not isinstance(column, KeyLists)  # bytes are no lists
    return written(column, 0, len(values))


def distinct_values(array: pa.Array) -> pa.Array:
    """Returns the distinct values of a column (`is_slot_type`), or in its lists, in order of occurrence.

    They are bytes without nulls: text as it is, digits of whole numbers, and an empty value for a missing
    one.
    """
    if not is_list_type(array.type):
        return _distinct(array)
    values = _distinct(array.flatten())
    if array.null_count:  # a row without a list has the missing value
        missing = pa.array([b""], values.type)
        values = pc.unique(pa.concat_arrays([values, missing]))
    return values


def _distinct(values: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        # Two entries of a dictionary may be equal, and some unused: decoded after most are gone.
        values = pc.unique(values).dictionary_decode()
    if not is_text_type(values.type):
        values = values.cast(pa.string())  # decimal digits
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    kind = pa.large_binary() if is_large else pa.binary()
    return pc.unique(values.cast(kind).fill_null(b""))


class _Seen:
    """A set of keys, each with the second hash of its first value.

    Sorted runs, each at least twice as long as the next: n keys are merged log(n) times each.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, Keys]] = []
        # distinct values that were not added, since another one has their key
        self.collided: set[tuple[int, int]] = set()

    def add(self, keys: Keys, hashes: Keys) -> NDArray[np.bool_]:
        """Adds keys uint64[n] of distinct values; returns bool[n], whether each is new."""
        is_new = np.zeros(keys.size, np.bool_)
        _, first, of_first = np.unique(keys, return_index=True, return_inverse=True)
        is_new[first] = True
        self._note(keys, hashes, hashes[first][of_first])
        for run_keys, run_hashes in self._runs:
            places = np.minimum(np.searchsorted(run_keys, keys), run_keys.size - 1)
            is_known = run_keys[places] == keys
            self._note(keys[is_known], hashes[is_known], run_hashes[places[is_known]])
            is_new &= ~is_known
        if is_new.any():
            self._insert(keys[is_new], hashes[is_new])
        return is_new

    def _note(self, keys: Keys, hashes: Keys, of_first: Keys) -> None:
        differs = hashes != of_first
        pairs = zip(keys[differs].tolist(), hashes[differs].tolist(), strict=True)
        self.collided.update(pairs)

    def _insert(self, keys: Keys, hashes: Keys) -> None:
        while self._runs and self._runs[-1][0].size < 2 * keys.size:
            run_keys, run_hashes = self._runs.pop()
            keys, hashes = np.concatenate([run_keys, keys]), np.concatenate([run_hashes, hashes])
        order = np.argsort(keys)
        self._runs.append((keys[order], hashes[order]))
