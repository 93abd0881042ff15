"""Embedding tables of a model, and what is looked up in them for a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_model.parameters import Floats

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """An embedding table of the model.

    Attributes:
        name: Of the table.
        dim: Width of an embedding.
        init_range: New embeddings are uniform in [-init_range, init_range).
        slots: Slots to look up, by number from 0; None: all.
        crosses: Crosses to look up, pairs of slot numbers (ctr_model/slots.py).
        optimizer: Default optimizer of this table, as in a job: {"name": "ftrl", "learning_rate": 0.1};
            None: that of all tables. A job may override it.
        learning_rate: Of that of all tables, if the job does not choose one; None: the optimizer's default.
    """

    name: str
    dim: int
    init_range: float = 0.0
    slots: tuple[int, ...] | None = None
    crosses: tuple[tuple[int, int], ...] = ()
    optimizer: Mapping[str, str | float] | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        """Converts lists to tuples."""
        if self.slots is not None:
            object.__setattr__(self, "slots", tuple(self.slots))
        object.__setattr__(
            self, "crosses", tuple((first, second) for first, second in self.crosses)
        )

    def num_slots(self, of_schema: int) -> int:
        """Returns how many slots and crosses are looked up in this table, for a schema of so many slots."""
        return (of_schema if self.slots is None else len(self.slots)) + len(self.crosses)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The rows of a batch's unique keys in one table, and their mapping to examples and slots.

    Attributes:
        rows: float32[N, D], the embeddings of the unique keys of the table's slots.
        inverse: int32[L]; occurrence `i` is unique key `inverse[i]`.
        offsets: int32[B * S + 1]; example `b`, slot `s` owns the occurrences
            `offsets[b * S + s]` to `offsets[b * S + s + 1]`, exclusive.
        num_slots: S, the table's slots and crosses.
    """

    rows: Floats
    inverse: Ints
    offsets: Ints
    num_slots: int
