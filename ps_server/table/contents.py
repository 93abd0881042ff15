"""Contents of tables and dense blocks as plain arrays, for checkpoints: shards, pieces, and their sources."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import TableSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of one shard."""

    keys: Keys  # uint64[N], ascending
    weights: Values  # float32[N, D]
    state: Values  # float32[N, K], optimizer state
    statistics: Values  # float32[N, S]; copied bit by bit, as not all are floats


@dataclass(frozen=True, slots=True)
class DensePiece:
    """Elements `[start, start + p)` of a dense block."""

    start: int  # first element
    weights: Values  # float32[p]
    element_state: Values  # float32[j, p], optimizer state of each element
    scalars: Values  # float32[s], optimizer state of the whole piece


class _Shards(Protocol):
    @property
    def spec(self) -> TableSpec:
        """The table's spec."""

    @property
    def shards(self) -> Iterable[int]:
        """Shards of this server."""


class TableSource(_Shards, Protocol):
    """One server's shards of a table, or of its candidates, as rows of dim 0."""

    @property
    def state_width(self) -> int:
        """K, the width of `Rows.state`."""

    @property
    def statistics_width(self) -> int:
        """S, the width of `Rows.statistics`."""

    def export_shard(self, shard: int) -> Rows:
        """Returns the rows of one of `shards`."""


class RemovedSource(TableSource, Protocol):
    """Keys removed since the base of a delta, in one server's shards, as rows of dim 0."""

    @property
    def passes(self) -> int:
        """Passes that ended since, in each of which all rows aged."""


class CountersSource(_Shards, Protocol):
    """One server's Bloom filter counters of a table."""

    def export_shard(self, shard: int) -> NDArray[np.uint8]:
        """Returns the counters of one of `shards` as bytes, uint8[c]."""
