"""What goes into a checkpoint and comes out of it: one shard of a table, one piece of a dense block.

Plain arrays; how a table holds its rows in memory does not show here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protos.gradients import Values
from protos.keys import Keys
from protos.spec import DenseSpec, TableSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of one shard.

    Attributes:
        keys: uint64[N], ascending.
        weights: float32[N, D].
        state: float32[N, K], the optimizer's.
        statistics: float32[N, S], what is counted of each key; the bits are kept, numbers or not.
    """

    keys: Keys
    weights: Values
    state: Values
    statistics: Values


@dataclass(frozen=True, slots=True)
class DensePiece:
    """The part `[start, start + p)` of a dense block.

    Attributes:
        start: Position of the first element in the block.
        weights: float32[p].
        element_state: float32[j, p], the optimizer's state of each element.
        scalars: float32[s], the optimizer's state of the whole piece.
    """

    start: int
    weights: Values
    element_state: Values
    scalars: Values


class TableSource(Protocol):
    """One server's shards of a table, or of the keys that have no row in it yet: then of dim 0."""

    @property
    def spec(self) -> TableSpec:
        """What the table is declared to be."""
        ...

    @property
    def shards(self) -> Iterable[int]:
        """Numbers of the shards held."""
        ...

    @property
    def state_width(self) -> int:
        """K, the width of `Rows.state`."""
        ...

    @property
    def statistics_width(self) -> int:
        """S, the width of `Rows.statistics`."""
        ...

    def export_shard(self, shard: int) -> Rows:
        """Returns the rows of one of `shards`."""
        ...


class RemovedSource(TableSource, Protocol):
    """Keys that lost their row since the base of a delta, in one server's shards: rows of dim 0."""

    @property
    def passes(self) -> int:
        """How often the other rows have aged since."""
        ...


class CountersSource(Protocol):
    """One server's counters of the keys that have no row in a table."""

    @property
    def spec(self) -> TableSpec:
        """Of the table."""
        ...

    @property
    def shards(self) -> Iterable[int]:
        """Numbers of the shards held."""
        ...

    def export_shard(self, shard: int) -> NDArray[np.uint8]:
        """Returns the counters of one of `shards` as bytes, uint8[c]."""
        ...


class DenseSource(Protocol):
    """One server's piece of a dense block."""

    @property
    def spec(self) -> DenseSpec:
        """What the block is declared to be."""
        ...

    def export(self) -> DensePiece:
        """Returns the piece."""
        ...
