"""A move of shards from server to server, as its messages have it; docs/moves.md says how one goes.

begin --> take from sources, put to targets, until little changes --> hold, drain, close: pushes wait
      --> take and put the rest --> prepare: all servers can do it --> end: by the new map
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store.parameters import Version
from ctr_ps.protos.store.state_transfer import BlockState


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRows:
    """Rows of one table, or candidates, which have no weights; keys of `removed` rows were before them."""

    table: str
    keys: Keys  # uint64[N]
    weights: Values  # float32[N, D]
    state: Values  # float32[N, K]
    statistics: Values  # float32[N, S]
    removed: Keys  # uint64[M]
    are_candidates: bool = False


@dataclass(frozen=True, slots=True)
class MovedCounters:
    """A part of the counters of one shard's candidates."""

    table: str
    shard: int
    counters: NDArray[np.uint8]
    start: int  # the byte of the shard's counters at which they begin, a multiple of 8


@dataclass(frozen=True, slots=True)
class Moved:
    """What of a move fits a message; of blocks also where in the target's piece a stretch begins."""

    rows: Sequence[MovedRows] = ()
    blocks: Sequence[tuple[str, int, BlockState]] = ()
    counters: Sequence[MovedCounters] = ()

    @property
    def num_rows(self) -> int:
        """Rows, candidates and removed rows."""
        return sum(each.keys.size + each.removed.size for each in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        rows = ((e.keys, e.weights, e.state, e.statistics, e.removed) for e in self.rows)
        return sum(a.nbytes for arrays in rows for a in arrays) + sum(
            each.counters.nbytes for each in self.counters
        )


class Phase(enum.Enum):
    """What of a job waits while a move ends."""

    HOLD = enum.auto()
    """Pushes that are not in the cut; before it is known, all."""
    DRAIN = enum.auto()
    """The same, until all pushes in the cut are applied."""
    CLOSE = enum.auto()
    """All calls that change a server."""
    RELEASE = enum.auto()
    """None any more: the move goes on without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPushes:
    """How many pushes of a process have come, from the first on."""

    incarnation: int
    pushes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where the pushes before the new map end: steps before `step`, and the pushes `seen` by worker."""

    step: Version = 0
    seen: Mapping[int, SeenPushes] = field(default_factory=dict)
    completed: str = ""  # a digest of the loads and shrinks that were carried out


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record of an update log; see ps_server/durability/segments.py."""

    kind: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MapState:
    """The shard map of a server, and the move that it takes part in."""

    shard_map: ShardMap
    server: int | None  # its index; None: it waits to be added
    members: str  # of its job: "2 to 4 workers"
    move: str  # token of the move under way; empty: there is none
    last_move: str  # token of the move that has led to this map; empty: none
    tables: Sequence[TableSpec]  # that were declared
    blocks: Sequence[DenseSpec]
    rows: Sequence[int]  # of all tables, by place of their shards; as are the two below
    row_bytes: Sequence[int] = ()
    accesses: Sequence[int] = ()  # keys of pulls and pushes since the server started
    has_update_log: bool = False  # a process after it can go on where it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a move has taken from a server; `is_all`: nothing else has changed there."""

    moved: Moved
    is_all: bool
