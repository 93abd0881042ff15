"""Contents of tables and dense blocks as plain arrays, for checkpoints: shards, pieces, and their sources."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import TableSpec

ContentT = TypeVar("ContentT")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table; of a whole shard where no other is said."""

    keys: Keys  # uint64[N], ascending
    weights: Values  # float32[N, D]
    state: Values  # float32[N, K], optimizer state
    statistics: Values  # float32[N, S]; copied bit by bit, as not all are floats


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Returns the rows of all parts, at least one, which have the same widths."""
    if len(parts) == 1:
        return parts[0]
    names = [field.name for field in fields(Rows)]
    return Rows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True)
class DensePiece:
    """Elements `[start, start + p)` of a dense block."""

    start: int  # first element
    weights: Values  # float32[p]
    element_state: Values  # float32[j, p], optimizer state of each element
    scalars: Values  # float32[s], optimizer state of the whole piece


@dataclass(frozen=True, slots=True)
class ShardSource(Generic[ContentT]):
    """One server's shards of a table, or of its keys without a row: content by a function of their number.

    Candidates and removed keys are `Rows` of dim 0, counters of a Bloom filter bytes, uint8[c].
    """

    spec: TableSpec
    shards: Iterable[int]
    export_shard: Callable[[int], ContentT]
    state_width: int = 0  # K, the width of `Rows.state`
    statistics_width: int = 0  # S, the width of `Rows.statistics`
    passes: int = 0  # of removed keys, since the base; in each pass all rows aged
