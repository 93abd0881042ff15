"""A model's parameters: dense tensors in one flat vector, and rows of embedding tables, looked up by key.

Looked up are the keys of slots, and of crosses of two slots. A cross is a virtual slot: each pair of keys of
its two slots is a feature with their `cross_key`. It is empty if either slot is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import cross_key
from ctr_ps.ctr_model.jit import kernel

Floats = NDArray[np.float32]
Tensors = Sequence[Floats]
"""Dense parameters or their gradients, one per segment."""


class ModelInputError(ValueError):
    """Raised when a batch, embeddings, parameters or buffers do not match the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A tensor of dense parameters, row-major in the flat vector."""

    name: str
    shape: tuple[int, ...]
    init_std: float  # standard deviation of the normal initial values; 0: zeros


class FlatLayout:
    """Positions of the segments in the flat vector."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._shapes = [segment.shape for segment in segments]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._bounds = list(accumulate(sizes, initial=0))

    @property
    def length(self) -> int:
        """Length of the vector."""
        return self._bounds[-1]

    def views(self, vector: Floats) -> list[Floats]:
        """Returns the segments of `vector`, float32[P], as views; ModelInputError for another length."""
        if vector.shape != (self.length,):
            raise ModelInputError(
                f"the model has {self.length} dense parameters, the vector has shape {vector.shape}"
            )
        return [
            vector[start:stop].reshape(shape)
            for (start, stop), shape in zip(pairwise(self._bounds), self._shapes, strict=True)
        ]


Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """An embedding table of the model."""

    name: str  # unique in the model
    dim: int  # width of an embedding
    init_range: float = 0.0  # new embeddings are uniform in [-init_range, init_range)
    slots: tuple[int, ...] | None = None  # slots to look up, by number from 0; None: all
    # crosses to look up, pairs of slot numbers
    crosses: tuple[tuple[int, int], ...] = ()
    # default optimizer of this table, as in a job: {"name": "ftrl", "learning_rate": 0.1}; None:
    # the job's default
    optimizer: Mapping[str, str | float] | None = None
    # default rate with the job's default optimizer; None: the optimizer's own
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.slots is not None:
            object.__setattr__(self, "slots", tuple(self.slots))
        object.__setattr__(
            self, "crosses", tuple((first, second) for first, second in self.crosses)
        )

    def num_slots(self, of_schema: int) -> int:
        """Number of slots and crosses of this table, for a schema of `of_schema` slots."""
        return (of_schema if self.slots is None else len(self.slots)) + len(self.crosses)


class Lookup(NamedTuple):
    """The rows of a batch's unique keys in one table, and their mapping to examples and slots."""

    rows: Floats  # float32[N, D], the embeddings of the unique keys of the table's slots
    inverse: Ints  # int32[L]; occurrence `i` is unique key `inverse[i]`
    # int32[B * S + 1]; example `b`, slot `s` owns the occurrences `offsets[b * S + s]` to
    # `offsets[b * S + s + 1]`, exclusive
    offsets: Ints
    num_slots: int  # S, the table's slots and crosses


Lookups = Mapping[str, Lookup]
SparseGrads = Mapping[str, Floats]
"""By table, float32[N, D]."""


_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SlotKeys:
    """Keys by example and slot, in the layout of `Batch`; S counts slots and crosses."""

    keys: NDArray[np.uint64]
    offsets: NDArray[np.int32]
    num_slots: int


def select_slots(
    batch: Batch, slots: tuple[int, ...] | None, crosses: tuple[tuple[int, int], ...] = ()
) -> SlotKeys:
    """Returns the keys of slots, by number from 0 (None: all), then those of crosses."""
    if slots is None and not crosses:
        return SlotKeys(batch.keys, batch.offsets, batch.num_slots)
    plain = range(batch.num_slots) if slots is None else slots
    sources = np.array([*((slot, _NO_SLOT) for slot in plain), *crosses], np.int32).reshape(-1, 2)
    offsets = np.empty(batch.size * len(sources) + 1, np.int32)
    _count_keys(batch.offsets, batch.num_slots, sources, offsets)
    keys = np.empty(offsets[-1], np.uint64)
    _copy_keys(batch.keys, batch.offsets, batch.num_slots, sources, keys)
    return SlotKeys(keys, offsets, len(sources))


@kernel
def _count_keys(
    offsets: NDArray[np.int32],
    num_slots: int,
    sources: NDArray[np.int32],
    out: NDArray[np.int32],
) -> None:
    """Overwrites `out` int32[B * T + 1] with the offsets of the slots `sources` int32[T, 2]."""
    out[0] = 0
    position = 0
    for b in range((offsets.size - 1) // num_slots):
        for first, second in sources:
            i = b * num_slots + first
            count = offsets[i + 1] - offsets[i]
            if second != _NO_SLOT:
                i = b * num_slots + second
                count *= offsets[i + 1] - offsets[i]
            out[position + 1] = out[position] + count
            position += 1


@kernel
def _copy_keys(
    keys: NDArray[np.uint64],
    offsets: NDArray[np.int32],
    num_slots: int,
    sources: NDArray[np.int32],
    out: NDArray[np.uint64],
) -> None:
    """Overwrites `out` uint64[L] with the keys of the slots `sources` int32[T, 2]."""
    position = 0
    for b in range((offsets.size - 1) // num_slots):
        for first, second in sources:
            slot = b * num_slots + first
            for i in range(offsets[slot], offsets[slot + 1]):
                if second == _NO_SLOT:
                    out[position] = keys[i]
                    position += 1
                else:
                    other = b * num_slots + second
                    for j in range(offsets[other], offsets[other + 1]):
                        out[position] = cross_key(keys[i], keys[j])
                        position += 1
