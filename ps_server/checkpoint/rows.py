"""What goes into a checkpoint and comes out of it: one shard of a table, one piece of a dense block.

Plain arrays; how a table holds its rows in memory does not show here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from protos.gradients import Values
from protos.partition import Keys
from protos.spec import DenseSpec, TableSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of one shard.

    Attributes:
        keys: uint64[N], ascending.
        weights: float32[N, D].
        state: float32[N, K], the optimizer's.
    """

    keys: Keys
    weights: Values
    state: Values


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
    """One server's shards of a table."""

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

    def export_shard(self, shard: int) -> Rows:
        """Returns the rows of one of `shards`."""
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
