"""Rows of checkpoint files, in memory or mapped, looked up by binary search.

    bytes: ... | keys of shard 3, ascending | values of shard 3 | ... | keys of shard 5 | values ... |
                 ^ key_starts[3]              ^ value_starts[3]

A lookup touches only the pages it needs, so a mapped model of any size is ready at once, and processes that
map it share its memory. Keys are searched in groups, step by step together, so that their memory accesses
overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import shard_of
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import TableSpec
from ctr_ps.ps_server.checkpoint.storage.local_file import Mapped

_GROUP = 32
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class SavedShard:
    """Position of one shard in a file.

    `keys_at` is the offset in bytes of the keys, uint64 ascending, a multiple of 8; `values_at` that of the
    values, row by row.
    """

    rows: int
    keys_at: int
    values_at: int


@kernel
def _find(
    words: Keys,
    key_starts: NDArray[np.int64],
    num_rows: NDArray[np.int64],
    keys: Keys,
    positions: NDArray[np.int64],
) -> None:
    """Overwrites `positions` int64[N] with the index of each key in its shard, or -1."""
    starts = np.empty(_GROUP, np.int64)
    lows = np.empty(_GROUP, np.int64)
    counts = np.empty(_GROUP, np.int64)
    for first in range(0, keys.size, _GROUP):
        size = min(_GROUP, keys.size - first)
        longest = np.int64(0)
        for i in range(size):
            shard = shard_of(keys[first + i], num_rows.size)
            starts[i] = key_starts[shard]
            lows[i] = 0
            counts[i] = num_rows[shard]
            longest = max(longest, counts[i])
        while longest > 1:
            for i in range(size):
                half = counts[i] // 2
                if half and words[starts[i] + lows[i] + half] <= keys[first + i]:
                    lows[i] += half
                counts[i] -= half
            longest -= longest // 2
        for i in range(size):
            is_there = counts[i] == 1 and words[starts[i] + lows[i]] == keys[first + i]
            positions[first + i] = lows[i] if is_there else -1


@kernel
def _copy(
    content: NDArray[np.uint8],
    value_starts: NDArray[np.int64],
    keys: Keys,
    positions: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Copies the values of the keys found into their rows of `out` uint8[N, bytes of a row]."""
    row_bytes = out.shape[1]
    for i in range(keys.size):
        if positions[i] >= 0:
            start = value_starts[shard_of(keys[i], value_starts.size)] + positions[i] * row_bytes
            out[i] = content[start : start + row_bytes]


@kernel
def first_misplaced(keys: Keys, shard: int, num_shards: int) -> int:
    """Returns the position of the first key that is of another shard or not above the one before it.

    Without such a key, returns the number of keys.
    """
    for i in range(keys.size):
        if shard_of(keys[i], num_shards) != shard or (i and keys[i] <= keys[i - 1]):
            return i
    return keys.size


class SavedRows:
    """Rows of one file: some shards of a table. Read-only, so thread-safe.

    `content` is uint8[...], aligned to 8 bytes in memory, and trusted to hold `shards` at their positions.
    With `file`, it is checked for changes.
    """

    def __init__(
        self,
        content: NDArray[np.uint8],
        spec: TableSpec,
        dtype: np.dtype[np.float32] | np.dtype[np.float16],
        shards: Mapping[int, SavedShard],
        file: Mapped | None = None,
    ) -> None:
        self._file = file
        self._content = content
        self._words = content[: content.size // _KEY_BYTES * _KEY_BYTES].view(np.uint64)
        self._dim, self._dtype = spec.dim, dtype
        self._num_rows, self._key_starts, self._value_starts = np.zeros(
            (3, spec.num_shards), np.int64
        )
        for number, shard in shards.items():
            self._num_rows[number] = shard.rows
            self._key_starts[number] = shard.keys_at // _KEY_BYTES
            self._value_starts[number] = shard.values_at

    def read(self, keys: Keys, out: Values) -> NDArray[np.bool_]:
        """Writes the rows that this file has of `keys` uint64[N] into `out` float32[N, D].

        Returns bool[N], whether each key was found. Raises CheckpointError if a mapped file was changed.
        """
        self._require_unchanged()  # beyond the end of a file is no memory
        positions = np.empty(keys.size, np.int64)
        _find(self._words, self._key_starts, self._num_rows, keys, positions)
        found = positions >= 0
        values = np.empty((keys.size, self._dim), self._dtype)
        row_bytes = values.view(np.uint8).reshape(keys.size, self._dim * self._dtype.itemsize)
        _copy(self._content, self._value_starts, keys, positions, row_bytes)
        self._require_unchanged()
        np.copyto(out, values, where=found[:, np.newaxis])
        return found

    def _require_unchanged(self) -> None:
        if self._file is not None:
            self._file.require_unchanged()


@dataclass(frozen=True, slots=True)
class Layer:
    """Rows of a table in one checkpoint of a chain, and keys that it removes from older ones."""

    rows: Sequence[SavedRows]
    removed: Sequence[SavedRows]


def read_layers(layers: Sequence[Layer], keys: Keys, out: Values) -> NDArray[np.bool_]:
    """Writes the rows of existing `keys` uint64[N] into `out` float32[N, D]; leaves the others unchanged.

    `layers` are the newest first. Returns bool[N], whether each key has a row.
    """
    newest, *older = layers
    has_row, is_removed = _read_layer(newest, keys, out)
    is_open = ~(has_row | is_removed)
    for layer in older:
        places = np.flatnonzero(is_open)
        if not places.size:
            break
        found = out[places]
        is_there, is_removed = _read_layer(layer, keys[places], found)
        out[places] = found
        has_row[places] = is_there
        is_open[places] = ~(is_there | is_removed)
    return has_row


def _read_layer(
    layer: Layer, keys: Keys, out: Values
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Writes the rows of this layer; returns bool[N] twice: which keys it has, and which it removes."""
    has_row, is_removed = np.zeros((2, keys.size), np.bool_)
    for file in layer.rows:
        has_row |= file.read(keys, out)
    for file in layer.removed:
        is_removed |= file.read(keys, out[:, :0])
    return has_row, is_removed
