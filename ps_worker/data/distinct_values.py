"""The values of a slot in files, each once with its key: hashes cannot be inverted, but data can be hashed.

Memory holds 16 bytes for each distinct value: its key, and a second hash by which two values of one key are
told apart.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import MAX_SLOT
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.columnar.column_values import KeyLists, slot_keys
from ctr_ps.ps_worker.data.columnar.distinct import distinct_values
from ctr_ps.ps_worker.data.columns import columns_of, slots_only

Keys = NDArray[np.uint64]


class DistinctValues:
    """The distinct values of one slot in files, in one pass. For one thread.

    Attributes:
        rows: Rows read so far.
        distinct: Distinct keys so far.
        collisions: Values so far whose key an earlier value has, too; they are not yielded.
    """

    def __init__(
        self,
        files: Sequence[str],
        schema: Schema,
        slot: str,
        *,
        format: str | None = None,
        bad_rows: BadRows,
    ) -> None:
        """Takes the settings; opens no file.

        Args:
            files: Paths or URLs. Of files with named columns only that of the slot is read.
            schema: Gives the slot its number, and files in Criteo's layout their columns.
            slot: Name of the slot.
            format: Of the files; None: determined by the suffix.
            bad_rows: Counts malformed rows.

        Raises:
            SchemaError: If the schema has no such slot; names the nearest.
        """
        self.rows = self.distinct = self.collisions = 0
        self._files = files
        self._number = schema.slot_numbers[schema.slot_index(slot)]
        self._slot = slot
        self._schema = schema
        self._format = format
        self._bad_rows = bad_rows
        self._seen = _Seen()

    def __iter__(self) -> Iterator[tuple[pa.Array, Keys]]:
        """Yields values that are new, as an array of bytes, with their keys uint64[n].

        Raises:
            UsageError: If a file holds keys instead of values, or is of a format without values.
            DataError: Names the file that cannot be read, is damaged or has no such column.
            BadRowError: Names the malformed row that exceeded the limit.
        """
        only = slots_only([self._slot])
        for path in self._files:
            for columns in columns_of(
                path, only, self._bad_rows, format=self._format, layout=self._schema
            ):
                if columns.are_keys:
                    raise UsageError(
                        f"{path}: the file contains keys of {self._slot!r}, not its values: name the files "
                        f"that it was made from"
                    )
                self.rows += len(columns.offsets)
                values, keys = self._new(distinct_values(columns.slots[0]))
                if keys.size:
                    yield values, keys

    def _new(self, values: pa.Array) -> tuple[pa.Array, Keys]:
        keys = keys_of(values, self._number)
        is_new = self._seen.add(keys, keys_of(values, _other_slot(self._number)))
        self.collisions = self._seen.collisions
        self.distinct += int(np.count_nonzero(is_new))
        return values.filter(pa.array(is_new)), keys[is_new]


def keys_of(values: pa.Array, slot: int) -> Keys:
    """Returns the keys uint64[n] of values, bytes, in slot number `slot`."""
    column = slot_keys(values, slot)
    assert not isinstance(column, KeyLists)  # bytes are no lists
    keys = np.empty((len(values), 1), np.uint64)
    column.write(0, len(values), 0, keys)
    return keys.reshape(-1)


def _other_slot(slot: int) -> int:
    """Returns a slot whose hashes are a second opinion: values that collide in one do not in the other."""
    return MAX_SLOT if slot != MAX_SLOT else 1


class _Seen:
    """A set of keys, each with the second hash of its first value.

    Sorted runs, each at least twice as long as the next: n keys are merged log(n) times each.

    Attributes:
        collisions: Distinct values that were not added, since another one has their key.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, Keys]] = []
        self._collided: set[tuple[int, int]] = set()

    @property
    def collisions(self) -> int:
        return len(self._collided)

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
        self._collided.update(pairs)

    def _insert(self, keys: Keys, hashes: Keys) -> None:
        self._runs.append((keys, hashes))
        while len(self._runs) > 1 and self._runs[-2][0].size < 2 * self._runs[-1][0].size:
            (one, one_hashes), (other, other_hashes) = self._runs[-2:]
            self._runs[-2:] = [
                (np.concatenate([one, other]), np.concatenate([one_hashes, other_hashes]))
            ]
        merged, merged_hashes = self._runs[-1]
        order = np.argsort(merged)
        self._runs[-1] = (merged[order], merged_hashes[order])
