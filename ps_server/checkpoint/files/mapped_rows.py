"""Looking up rows where they are saved: binary search in mapped files, nothing is read beforehand.

    file:  ... | keys of shard 3, ascending | values of shard 3 | ... | keys of shard 5 | values ... |
                 ^ key_starts[3]              ^ value_starts[3]

A lookup touches the pages that it needs, so a model of any size is ready at once and shared by all processes
that map it. Searches of a block of keys go step by step together: their waits for memory overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.gradients import Values
from protos.keys import Keys
from protos.placement import shard_of
from protos.runtime.jit import kernel

_BLOCK = 32
_KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class SavedShard:
    """Where in a file's bytes the rows of one shard are.

    Attributes:
        rows: How many.
        keys_at: Where their keys begin, uint64 ascending; a multiple of 8.
        values_at: Where their values begin, row after row.
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
    """Overwrites `positions` int64[N] with each key's place in its shard; -1: it is not there."""
    starts = np.empty(_BLOCK, np.int64)
    lows = np.empty(_BLOCK, np.int64)
    counts = np.empty(_BLOCK, np.int64)
    for first in range(0, keys.size, _BLOCK):
        size = min(_BLOCK, keys.size - first)
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
    """Copies the values of keys with a position into their rows of `out` uint8[N, bytes of a row]."""
    row_bytes = out.shape[1]
    for i in range(keys.size):
        if positions[i] >= 0:
            start = value_starts[shard_of(keys[i], value_starts.size)] + positions[i] * row_bytes
            out[i] = content[start : start + row_bytes]


class MappedRows:
    """Rows of some shards of a table in the bytes of one file. Read-only, so any thread may read."""

    def __init__(
        self,
        content: NDArray[np.uint8],
        *,
        dim: int,
        dtype: np.dtype[np.float32] | np.dtype[np.float16],
        num_shards: int,
        shards: Mapping[int, SavedShard],
    ) -> None:
        """Takes what a file says of itself to be true.

        Args:
            content: uint8[...], the file, which begins at a multiple of 8 in memory.
            dim: Width of a row.
            dtype: Of its values.
            num_shards: Of the table.
            shards: Those that the file holds, by number.
        """
        self._content = content
        self._words = content[: content.size // _KEY_BYTES * _KEY_BYTES].view(np.uint64)
        self._dim, self._dtype = dim, dtype
        self._num_rows = np.zeros(num_shards, np.int64)
        self._key_starts = np.zeros(num_shards, np.int64)
        self._value_starts = np.zeros(num_shards, np.int64)
        for number, shard in shards.items():
            self._num_rows[number] = shard.rows
            self._key_starts[number] = shard.keys_at // _KEY_BYTES
            self._value_starts[number] = shard.values_at

    def read(self, keys: Keys, out: Values) -> NDArray[np.bool_]:
        """Writes the rows of those `keys` uint64[N] that are here into their rows of `out` float32[N, D].

        Returns:
            bool[N], which are.
        """
        positions = np.empty(keys.size, np.int64)
        _find(self._words, self._key_starts, self._num_rows, keys, positions)
        found = positions >= 0
        values = np.empty((keys.size, self._dim), self._dtype)
        row_bytes = values.view(np.uint8).reshape(keys.size, self._dim * self._dtype.itemsize)
        _copy(self._content, self._value_starts, keys, positions, row_bytes)
        np.copyto(out, values, where=found[:, np.newaxis])
        return found


@dataclass(frozen=True, slots=True)
class Layer:
    """One checkpoint's rows of a table, and keys of which older checkpoints have rows that are no more."""

    rows: Sequence[MappedRows]
    removed: Sequence[MappedRows]


def read_layers(layers: Sequence[Layer], keys: Keys, out: Values) -> None:
    """Writes the rows of those `keys` uint64[N] that have one into their rows of `out` float32[N, D].

    Args:
        layers: The newest first.
        keys: What to look up.
        out: Other rows stay as they are.
    """
    newest, *older = layers
    is_open = ~_read_layer(newest, keys, out)
    for layer in older:
        places = np.flatnonzero(is_open)
        if not places.size:
            return
        found = out[places]
        is_open[places] = ~_read_layer(layer, keys[places], found)
        out[places] = found


def _read_layer(layer: Layer, keys: Keys, out: Values) -> NDArray[np.bool_]:
    """Writes the rows that are here; returns bool[N], of which keys older layers have nothing to say."""
    is_known = np.zeros(keys.size, np.bool_)
    for file in layer.rows:
        is_known |= file.read(keys, out)
    for file in layer.removed:
        is_known |= file.read(keys, out[:, :0])
    return is_known
