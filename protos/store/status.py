"""Status of a store: sizes, progress, staleness, the last save; of several servers, merged; and its upkeep.

How stale pushes were is a histogram of versions between a pull and the push computed from it:

    bucket    0  1  2  3  4  5   ...  i
    staleness 0  1  2  3- 5- 9-  ...  2 ** (i - 2) + 1  to  2 ** (i - 1)
                       4  8  16
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import accumulate, zip_longest
from typing import Protocol, Self, TypeVar

from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.store.checkpoints import WorkerProgress
from ctr_ps.protos.store.parameters import FILE, Version

K = TypeVar("K", int, str)
T = TypeVar("T", "TableStatus", "Shrunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Counts of batches by staleness. Adding and merging return another histogram."""

    counts: tuple[int, ...] = ()  # batches in each bucket, without empty ones at the end
    total: int = 0  # sum of the staleness over all batches, exact
    largest: int = 0  # the largest seen, exact

    @property
    def batches(self) -> int:
        """Batches counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean over batches; 0 of none."""
        return self.total / self.batches if self.counts else 0.0

    def at_most(self, bounds: Sequence[int]) -> list[int]:
        """Returns how many batches had a staleness of at most each bound; bounds are ends of buckets."""
        counted = [0, *accumulate(self.counts)]
        return [counted[min(_bucket_of(bound), len(self.counts) - 1) + 1] for bound in bounds]

    def add(self, staleness: int, batches: int = 1) -> Self:
        """Returns the histogram with `batches` more of one staleness, which is not negative."""
        if not batches:
            return self
        bucket = _bucket_of(staleness)
        counts = [*self.counts, *[0] * (bucket + 1 - len(self.counts))]
        counts[bucket] += batches
        return type(self)(
            counts=tuple(counts),
            total=self.total + staleness * batches,
            largest=max(self.largest, staleness),
        )

    def merge(self, other: Self) -> Self:
        """Returns the histogram of what either has counted."""
        return type(self)(
            counts=tuple(map(sum, zip_longest(self.counts, other.counts, fillvalue=0))),
            total=self.total + other.total,
            largest=max(self.largest, other.largest),
        )

    def quantile(self, share: float) -> int:
        """Returns a staleness that at least `share` of the batches, from 0 to 1, do not exceed.

        The end of a bucket, so at most twice the exact quantile; 0 of no batches.
        """
        wanted = share * self.batches
        for bucket, counted in enumerate(accumulate(self.counts)):
            if counted and counted >= wanted:
                return min(_end_of(bucket), self.largest)
        return self.largest

    def as_dict(self) -> dict[str, object]:
        """Returns what a log or a report shows; buckets by their range, without empty ones."""
        return {
            "batches": self.batches,
            "mean": self.mean,
            "largest": self.largest,
            "counts": {
                _range_of(bucket): count for bucket, count in enumerate(self.counts) if count
            },
        }


def _bucket_of(staleness: int) -> int:
    return (staleness - 1).bit_length() + 1 if staleness else 0


def _end_of(bucket: int) -> int:
    return 1 << (bucket - 1) if bucket else 0


def _range_of(bucket: int) -> str:
    start, end = _end_of(bucket - 1) + 1 if bucket else 0, _end_of(bucket)
    return str(end) if start == end else f"{start}-{end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStatus:
    """Size of one table, or of one server's shards of it."""

    rows: int  # number of rows
    size_bytes: int  # memory of rows, index and marks
    candidates: int = 0  # keys that are counted but have no row yet; 0 where a Bloom filter counts
    candidate_bytes: int = 0  # memory of the counters
    expired: int = 0  # rows that shrinks have removed so far
    evicted: int = 0  # rows that made room for others in a table that was full, so far
    shards: int = 0  # number of shards
    smallest_shard: int = 0  # rows of the shard with the fewest
    largest_shard: int = 0  # rows of the shard with the most
    index_slots: int = 0  # slots of the index; each row takes one

    def __add__(self, other: "TableStatus") -> "TableStatus":
        """Returns the size of both parts."""
        total: TableStatus = _sum_of_fields(self, other)
        return replace(
            total,
            smallest_shard=min(self.smallest_shard, other.smallest_shard),
            largest_shard=max(self.largest_shard, other.largest_shard),
        )

    @property
    def created(self) -> int:
        """Rows admitted or loaded so far: a row is there, or was removed in one of two ways."""
        return self.rows + self.expired + self.evicted

    @property
    def load_factor(self) -> float:
        """Share of the index that is taken; 0 without one."""
        return self.rows / self.index_slots if self.index_slots else 0.0

    @property
    def imbalance(self) -> float:
        """(max - min) / mean of the rows of shards; 0 without rows."""
        if not self.rows:
            return 0.0
        return (self.largest_shard - self.smallest_shard) * self.shards / self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What a shrink removed from one table, or from one server's shards of it, or would remove."""

    rows: int = 0  # number of rows
    size_bytes: int = 0  # by how much the table is smaller
    left_rows: int = 0  # rows that are left
    # keys without a row that are no longer counted; 0 where a Bloom filter counts
    candidates: int = 0

    def __add__(self, other: "Shrunk") -> "Shrunk":
        """Returns what was removed from both parts."""
        return _sum_of_fields(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """Cost of a save for training, on one server or the most of any server of a cluster."""

    pause_s: float  # for how long pushes were held back while the snapshot was taken
    duration_s: float  # from the snapshot until all was written; 0 before that
    is_over: bool  # whether it has ended, saved or failed
    number: int = 1  # from 1, of the saves of this process


class WorkerState(enum.Enum):
    """Where a worker is in a job."""

    PRESENT = "present"
    LEFT = "left"
    LOST = "lost"
    MISSING = "missing"

    def __str__(self) -> str:
        """Returns what it is called beside a worker's name."""
        match self:
            case WorkerState.LEFT:
                return "has left"
            case WorkerState.MISSING:
                return "has not joined"
        return str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What a store holds and has seen."""

    version: Version  # steps applied
    tables: Mapping[str, TableStatus]  # by name
    examples: Mapping[int, int]  # examples pushed so far, by worker
    left: frozenset[int]  # workers that have left
    # of the batches pushed so far. A push counts as many times as it completes batches, a worker's
    # contribution to a synchronous step once; each with the version that it was applied to minus
    # the version that it was computed from. Every server counts every batch, by its own versions
    staleness: Staleness
    # how much of each worker's training is in the parameters; a worker without has no entry
    progress: Mapping[int, WorkerProgress]
    last_save: SaveStatus | None = None  # of the last save; None: there was none
    # pushes that came again, because their answer was lost, and were not applied again
    duplicates: int = 0
    # workers whose leases ran out, and whose places no other processes have taken
    lost: frozenset[int] = frozenset()
    # workers for whose part of a synchronous step others wait
    awaited: frozenset[int] = frozenset()
    # of all workers, that are applied, those of the runs that this one resumes included: the step
    # of schedules of learning rates
    batches: int = 0
    # seconds without a sign of life, by worker that has joined and not left. They pass by
    # themselves, so they do not count when two are compared
    silent_s: Mapping[int, float] = field(default_factory=dict, compare=False)
    # seconds of silence after which a worker is lost; None: it never is, or nobody has joined
    lease_s: float | None = None

    @property
    def num_examples(self) -> int:
        """Examples pushed so far, of all workers."""
        return sum(self.examples.values())

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables.values())

    @property
    def size_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.size_bytes for table in self.tables.values())

    def state_of(self, worker: int) -> WorkerState:
        """Returns where a worker is in the job."""
        if worker in self.left:
            return WorkerState.LEFT
        if worker in self.lost:
            return WorkerState.LOST
        return WorkerState.PRESENT if worker in self.silent_s else WorkerState.MISSING

    def steps_behind(self) -> dict[int, int]:
        """Returns how many steps each worker of which something is applied is behind the first of them."""
        newest = max((progress.step for progress in self.progress.values()), default=0)
        return {worker: newest - progress.step for worker, progress in self.progress.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffer:
    """Where a server takes calls that move data, beside gRPC; see protos/wire/stream.py."""

    port: int  # on the host of the server
    key: int  # chosen at random by the server that has this port now


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """Status of one server, and its place in the list of servers; a spare's is NO_SERVER."""

    store: StoreStatus
    server_index: int
    num_servers: int
    stream: StreamOffer | None = None
    shard_map_epoch: int = 0  # 0: not said
    format: int = FORMAT


class Admin(Protocol):
    """Upkeep and observation of a store."""

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """Ends a pass over the data: rows age, and those that have expired are removed.

        Tables that keep statistics decay them and count the pass for rows that were not pushed; then each
        table's own rules (`TableSpec.expiry`) say which rows are removed, and `max_norm` removes from all
        tables the rows whose weights have at most this L2 norm, too. A removed key is one without a row, as
        if it had never been pushed. Others may push and pull meanwhile; while they wait in a barrier, the
        same rows are removed on any number of servers.

        Returns what was removed and what is left, by table; after a `dry_run` what would be, and nothing is
        changed. Raises ProtocolError if `max_norm` is negative or not finite, or a table has replicas;
        nothing was changed.
        """

    def digest(self) -> str:
        """Returns the digest of all parameters and optimizer states of rows, in hexadecimal.

        Equal models have equal digests on any number of servers: docs/checkpoint.md says what is hashed.
        """

    def status(self) -> StoreStatus:
        """Returns what the store holds and has seen, merged over servers."""


def merge_status(parts: Sequence[StoreStatus]) -> StoreStatus:
    """Returns the status of a cluster: sizes add up, the rest every server has seen alike.

    Except staleness: pushes reach each server in an order of its own, so the counts of all servers are kept,
    each batch once for every server.
    """
    return StoreStatus(
        version=min(part.version for part in parts),
        tables=sum_by_name(part.tables for part in parts),
        examples={
            worker: max(part.examples.get(worker, 0) for part in parts)
            for worker in sorted({worker for part in parts for worker in part.examples})
        },
        left=frozenset.intersection(*(part.left for part in parts)),
        staleness=reduce(Staleness.merge, (part.staleness for part in parts)),
        progress=merge_progress([part.progress for part in parts]),
        last_save=merge_saves([part.last_save for part in parts]),
        duplicates=sum(part.duplicates for part in parts),
        lost=frozenset.union(*(part.lost for part in parts)),
        awaited=frozenset.union(*(part.awaited for part in parts)),
        batches=min(part.batches for part in parts),
        silent_s={
            worker: min(part.silent_s[worker] for part in parts)
            for worker in _known_to_all([part.silent_s for part in parts])
        },
        lease_s=parts[0].lease_s,
    )


def merge_progress(parts: Sequence[Mapping[int, WorkerProgress]]) -> dict[int, WorkerProgress]:
    """Returns, by worker, the least progress of any server; a worker unknown to one server has none.

    A worker's steps are numbered on from run to run, so they compare where incarnations differ. Of one that
    reads a stream it is known what any server has beyond that.
    """
    known = set(_known_to_all(parts))
    known |= {k for part in parts for k, each in part.items() if each.sent or each.partitions}
    return {
        worker: _least_of([part.get(worker, _NOTHING) for part in parts])
        for worker in sorted(known)
    }


_NOTHING = WorkerProgress(incarnation=0, sequence=0, step=0, position="")


def _least_of(parts: Sequence[WorkerProgress]) -> WorkerProgress:
    least = min(parts, key=lambda each: each.step)
    if not any(each.partitions or each.sent for each in parts):
        return least
    most = max(parts, key=lambda each: each.step + each.sent)
    positions = {**most.partitions, **most.sent_partitions}
    beyond = {name: at for name, at in positions.items() if least.partitions.get(name) != at}
    found = {name: at for name, at in least.partitions.items() if not name.startswith(FILE)}
    for name in _known_to_all([each.partitions for each in parts]):
        if name.startswith(FILE):
            found[name] = min(each.partitions[name] for each in parts)
    return replace(
        least,
        partitions=found,
        sent=most.step + most.sent - least.step,
        sent_partitions=beyond,
    )


def merge_saves(parts: Sequence[SaveStatus | None]) -> SaveStatus | None:
    """Returns the cost of a save for a cluster: the most of any server."""
    saves = [part for part in parts if part is not None]
    if not saves:
        return None
    return SaveStatus(
        pause_s=max(save.pause_s for save in saves),
        duration_s=max(save.duration_s for save in saves),
        is_over=all(save.is_over for save in saves),
        number=max(save.number for save in saves),
    )


def _known_to_all(parts: Sequence[Mapping[K, object]]) -> list[K]:
    return sorted(set.intersection(*map(set, parts))) if parts else []


def _sum_of_fields(one: T, other: T) -> T:
    return type(one)(
        **{
            field.name: getattr(one, field.name) + getattr(other, field.name)
            for field in fields(one)
        }
    )


def sum_by_name(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Returns the sums over servers, by table."""
    total: dict[str, T] = {}
    for part in parts:
        for name, each in part.items():
            total[name] = total[name] + each if name in total else each
    return dict(sorted(total.items()))
