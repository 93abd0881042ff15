"""Embedding tables of a model, and the lookups of a batch in them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.parameters import Floats

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """An embedding table of the model."""

    name: str  # unique in the model
    dim: int  # width of an embedding
    init_range: float = 0.0  # new embeddings are uniform in [-init_range, init_range)
    slots: tuple[int, ...] | None = None  # slots to look up, by number from 0; None: all
    # crosses to look up, pairs of slot numbers (ctr_model/slots.py)
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


@dataclass(frozen=True, slots=True)
class Lookup:
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
