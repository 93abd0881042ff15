"""All parameters that one process holds: the server's part of a cluster, or everything of an embedded run.

    push --check--> workers --> tables    on arrival, or once all parts of a step are there
    pull --wait for version--> tables

A push is checked as a whole before any part of it is applied. Tables lock their own shards, workers.py
what it knows of the workers; the store's lock guards only which tables and blocks there are.
"""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from protos.errors import (
    CheckpointError,
    ProtocolError,
    SpecConflictError,
    UnknownTableError,
)
from protos.gradients import Gradients, Values, require_finite
from protos.numbers import Numbers
from protos.partition import Keys
from protos.spec import AdmissionSpec, DenseSpec, TableSpec
from protos.store import (
    Changed,
    Future,
    Missing,
    Parcel,
    Pulled,
    Reduced,
    ReduceOp,
    Shrunk,
    Stamp,
    StoreStatus,
    Version,
    WorkerProgress,
)
from ps_server.checkpoint.digest import model_digest, shard_digest
from ps_server.checkpoint.manifest import Part
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.roots import Roots
from ps_server.checkpoint.writer import save_checkpoint, shared_folder, write_part
from ps_server.cuts import Cuts, StoreCut, cut_all
from ps_server.mailbox import INBOX_BYTES
from ps_server.table.admission import check_score_source
from ps_server.table.dense_table import DenseTable
from ps_server.table.sparse_table import SparseTable
from ps_server.table.statistics import Clock, wall_clock
from ps_server.waiting import Answered
from ps_server.workers import Workers

logger = logging.getLogger(__name__)

DEFAULT_WAIT_LIMIT_S = 600.0


class ParameterStore:
    """Tables, dense blocks, steps and barriers of one process: a `protos.store.Store`. Thread-safe."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        server_index: int = 0,
        num_servers: int = 1,
        wait_limit_s: float = DEFAULT_WAIT_LIMIT_S,
        inbox_bytes: int = INBOX_BYTES,
        checkpoint_roots: Sequence[str] = (),
        clock: Clock = wall_clock,
    ) -> None:
        """Makes an empty store.

        Args:
            num_workers: Workers of the job.
            server_index: Which server of the cluster this is.
            num_servers: Servers of the cluster; 1 holds everything.
            wait_limit_s: How long a pull, a barrier or a parcel waits for other workers, in seconds.
            inbox_bytes: Limit of the parcels that wait for one worker.
            checkpoint_roots: Folders in which alone it saves and loads; none: anywhere.
            clock: When rows are seen.
        """
        self.server_index = server_index
        self.num_servers = num_servers
        self.num_workers = num_workers
        self._wait_limit_s = wait_limit_s
        self._inbox_bytes = inbox_bytes
        self._clock = clock
        self._roots = Roots(checkpoint_roots)
        self._tables: dict[str, SparseTable] = {}
        self._blocks: dict[str, DenseTable] = {}
        self._undeclared: set[str] = set()  # loaded, but not yet claimed by a job
        self._lock = threading.Lock()
        self._cuts = Cuts(self._freeze, wait_limit_s=wait_limit_s)
        self.reset_membership()

    def reset_membership(self) -> None:
        """Forgets the workers, their steps and what they pushed, as for the next job; keeps parameters."""
        self._workers = Workers(
            self.num_workers,
            wait_limit_s=self._wait_limit_s,
            inbox_bytes=self._inbox_bytes,
            apply=self._apply,
            applying=self._cuts.changing,
        )
        for table in self._tables.values():
            if table.spec.records_changes:  # the next job's workers know nothing yet
                table.record_changes(self.num_workers)

    # Declaring

    def create_table(self, spec: TableSpec) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            table = self._tables.get(spec.name)
            check_score_source(spec, self._declared_spec(spec.admission))
            if table is None:
                self._refuse_taken_name(spec.name)
                self._tables[spec.name] = self._new_table(spec)
                return
            if spec.name in self._undeclared:
                self._tables[spec.name] = self._claim(table, spec)
                self._undeclared.discard(spec.name)
            else:
                _require_equal_spec(table.spec, spec)

    def create_dense(self, spec: DenseSpec) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            block = self._blocks.get(spec.name)
            if block is None:
                self._refuse_taken_name(spec.name)
                self._blocks[spec.name] = self._new_block(spec)
            elif spec.name in self._undeclared:
                _require_same_shape(block.spec, spec)
                block.declare(spec)
                self._undeclared.discard(spec.name)
            else:
                _require_equal_spec(block.spec, spec)

    def _new_table(self, spec: TableSpec) -> SparseTable:
        return SparseTable(
            spec,
            server_index=self.server_index,
            num_servers=self.num_servers,
            num_observers=self.num_workers if spec.records_changes else 0,
            clock=self._clock,
        )

    def _new_block(self, spec: DenseSpec) -> DenseTable:
        return DenseTable(spec, server_index=self.server_index, num_servers=self.num_servers)

    def _declared_spec(self, admission: AdmissionSpec | None) -> TableSpec | None:
        """Returns the spec of the table by whose score another one admits keys, if it was declared."""
        if admission is None or admission.table in self._undeclared:
            return None
        table = self._tables.get(admission.table)
        return None if table is None else table.spec

    def _refuse_taken_name(self, name: str) -> None:
        if name in self._tables or name in self._blocks:
            raise SpecConflictError(f"{name!r} is both a table and a dense block: rename one")

    def _claim(self, table: SparseTable, spec: TableSpec) -> SparseTable:
        """Returns the rows of a loaded table as a job declares them."""
        _require_same_shape(table.spec, spec)
        if (spec.statistics is None) != (table.spec.statistics is None):
            claimed = self._new_table(spec)
            for shard in table.shards:
                claimed.write(table.export_shard(shard))
            return claimed
        table.declare(spec)
        if spec.records_changes:
            table.record_changes(self.num_workers)
        return table

    # Moving data

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `protos.store.Store`; done when returned, unless it waits for `at`."""
        workers = self._workers
        tables = {name: self._table(name) for name in keys}

        def answer() -> Pulled:
            version = workers.version  # read first: the rows may have more, never less
            rows = {name: table.pull(keys[name], missing) for name, table in tables.items()}
            return Pulled(rows, version)

        return workers.at_version(at, answer)

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; `into` has the length of this process's pieces."""
        workers = self._workers
        blocks = {name: self._block(name) for name in into}
        for name, block in blocks.items():
            if into[name].shape != (block.length,):
                raise ProtocolError(
                    f"pull of dense block {name!r} into shape {into[name].shape}, expected "
                    f"({block.length},)"
                )

        def answer() -> Version:
            version = workers.version
            for name, block in blocks.items():
                block.pull(into[name])
            return version

        return workers.at_version(at, answer)

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """See `protos.store.Store`; done when returned."""
        workers = self._workers
        workers.require_member(worker)
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        recording = {name: self._recording_table(name) for name in tables}
        version, room = workers.version, max_rows
        rows: dict[str, tuple[Keys, Values]] = {}
        for name, table in recording.items():
            rows[name] = keys, _ = table.take_changed(worker, room) if room else _no_rows(table)
            room -= keys.size
        return Answered(Changed(rows, version, has_more=not room))

    def piece_length(self, block: str) -> int:
        """Returns the length of this process's piece of a dense block."""
        return self._block(block).length

    def push_grad(
        self, gradients: Gradients, stamp: Stamp, *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`."""
        self._workers.require_member(stamp.worker)
        self._check(gradients)
        if at is None:
            return Answered(self._workers.push_on_arrival(gradients, stamp))
        return Answered(self._workers.push_part(gradients, stamp, at))

    def _table(self, name: str) -> SparseTable:
        if name not in self._tables:
            raise UnknownTableError(f"no table {name!r}, there are: {sorted(self._tables)}")
        return self._tables[name]

    def _recording_table(self, name: str) -> SparseTable:
        table = self._table(name)
        if not table.spec.records_changes:
            raise ProtocolError(
                f"table {name!r} does not record changes: declare it with records_changes=True"
            )
        return table

    def _block(self, name: str) -> DenseTable:
        if name not in self._blocks:
            raise UnknownTableError(f"no dense block {name!r}, there are: {sorted(self._blocks)}")
        return self._blocks[name]

    def _check(self, gradients: Gradients) -> None:
        for name, grad in gradients.sparse.items():
            table = self._table(name)
            table.check(grad)
            if table.spec.admission is not None and table.spec.admission.table:
                self._table(table.spec.admission.table)
        for name, dense in gradients.dense.items():
            self._block(name).check(dense)
        require_finite(gradients)

    def _apply(self, gradients: Gradients, source: int) -> None:
        admits_by_score = []
        for name, grad in gradients.sparse.items():
            table = self._tables[name]
            if table.spec.admission is not None and table.spec.admission.table:
                scoring = self._tables[table.spec.admission.table]
                admits_by_score.append((scoring, table, grad))
            else:
                table.push(grad, source)
        for scoring, table, grad in admits_by_score:  # once this push is in the scores
            table.push(grad, source, scoring.scores(grad.keys))
        for name, dense in gradients.dense.items():
            self._blocks[name].push(dense)

    # Steps, barriers and parcels

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        return self._workers.barrier(name, worker, step=step)

    def all_reduce(
        self, name: str, worker: int, values: Numbers, op: ReduceOp, *, step: Version
    ) -> Future[Reduced]:
        """See `protos.store.Store`."""
        return self._workers.all_reduce(name, worker, values, op, step=step)

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """See `protos.store.Store`."""
        return self._workers.advance(worker, clock, at_least=at_least)

    def post_parcel(self, box: str, parcel: Parcel) -> Future[None]:
        """See `protos.store.Store`."""
        return self._workers.post_parcel(box, parcel)

    def take_parcels(self, box: str, worker: int, *, received: int) -> Future[Sequence[Parcel]]:
        """See `protos.store.Store`."""
        return self._workers.take_parcels(box, worker, received=received)

    def done(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        self._workers.done(worker, step=step)

    def all_done(self) -> bool:
        """Whether every worker has left."""
        return self._workers.all_done()

    # Checkpoints

    def save(
        self,
        url: str,
        attachments: Mapping[str, bytes],
        *,
        on_cut: Callable[[], None] | None = None,
    ) -> str:
        """See `protos.store.Store`; for a store that holds everything."""

        def write_parts(folder: str, token: str) -> list[Part]:
            self.cut(token)
            if on_cut is not None:
                on_cut()
            return [self.save_part(folder, token)]

        return save_checkpoint(
            url,
            write_parts=write_parts,
            tables={name: table.spec for name, table in self._tables.items()},
            blocks={name: block.spec for name, block in self._blocks.items()},
            attachments=attachments,
        )

    def cut(self, token: str) -> None:
        """Freezes this process's parameters for the `save_part` with the same token.

        It has to follow soon; after a minute, or when another cut is taken, this one is dropped.

        Raises:
            CheckpointError: If memory is short.
            WaitTimeoutError: If another save does not end in time.
        """
        self._cuts.take(token)

    def save_part(self, folder: str, token: str) -> Part:
        """Writes this process's shards and pieces into a folder, and returns what was written.

        They are as they were at the cut of the same token, which ends with this.

        Raises:
            CheckpointError: If the folder is not in the roots or not the one that holds the token, or cannot
                be written.
            ProtocolError: If there is no such cut.
        """
        with self._cuts.writing(token) as frozen:
            self._roots.require([folder])
            entries = write_part(
                shared_folder(folder, token),
                self.server_index,
                frozen.tables,
                frozen.blocks,
                candidates=frozen.candidates,
                counters=frozen.counters,
            )
        return Part(entries=tuple(entries), version=frozen.version, workers=frozen.workers)

    def _freeze(self) -> StoreCut:
        with self._lock:
            tables, blocks = list(self._tables.values()), list(self._blocks.values())
        return cut_all(tables, blocks, self._workers.version, self._workers.progress())

    def load(self, url: str) -> None:
        """See `protos.store.Store`; reads this process's shards and pieces."""
        with self._cuts.between_saves("a load"):
            self._load(self._roots.open(url))

    def _load(self, checkpoint: Checkpoint) -> None:
        checkpoint.require((self._tables.keys() | self._blocks.keys()) - self._undeclared)
        tables = {name: self._load_table(checkpoint, name) for name in checkpoint.tables}
        blocks = {name: self._load_block(checkpoint, name) for name in checkpoint.blocks}
        with self._lock:
            self._undeclared |= (tables.keys() - self._tables.keys()) | (
                blocks.keys() - self._blocks.keys()
            )
            self._tables |= tables
            self._blocks |= blocks

    def resume(self, version: Version, progress: Mapping[int, WorkerProgress]) -> None:
        """See `protos.store.Store`."""
        self._workers.resume(version, progress)

    def _load_table(self, checkpoint: Checkpoint, name: str) -> SparseTable:
        saved = checkpoint.tables[name]
        # Who loads to read has no use for what is of a job; a job that wants it declares so. Admission
        # stays: it says what keys without a row read, and counts them.
        unclaimed = replace(saved, records_changes=False, expiry=None)
        spec = self._tables[name].spec if name in self._tables else unclaimed
        _require_loadable(saved, spec)
        table = self._new_table(spec)
        for _, rows in checkpoint.read_shards(name, table.shards):
            table.write(rows)
        _load_candidates(checkpoint, saved, table)
        return table

    def _load_block(self, checkpoint: Checkpoint, name: str) -> DenseTable:
        saved = checkpoint.blocks[name]
        spec = self._blocks[name].spec if name in self._blocks else saved
        _require_loadable(saved, spec)
        block = self._new_block(spec)
        block.restore(checkpoint.read_dense(name, block.piece))
        return block

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """See `protos.store.Store`; of this process's shards."""
        if max_norm is not None and not 0 <= max_norm < math.inf:
            raise ProtocolError(f"max_norm is {max_norm}, expected a finite number of at least 0")
        with self._lock:
            tables = dict(self._tables)
        for name, table in tables.items():
            if table.spec.records_changes:
                raise ProtocolError(
                    f"table {name!r} has replicas, which would not hear of it: shrink the saved model in a "
                    f"job of another mode"
                )
        with self._cuts.between_saves("a shrink"):
            return {
                name: table.shrink(max_norm=max_norm, dry_run=dry_run)
                for name, table in tables.items()
            }

    def shard_digests(self) -> dict[tuple[str, int], bytes]:
        """Returns the digest of each shard that this process holds, by table and shard."""
        return {
            (name, shard): shard_digest(table.export_shard(shard))
            for name, table in self._tables.items()
            for shard in table.shards
        }

    def digest(self) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        return model_digest(self._dense_vectors(), self.shard_digests())

    def _dense_vectors(self) -> dict[str, Values]:
        if self.num_servers > 1:
            raise ProtocolError("one server of several cannot see the whole model; ask the client")
        vectors = {name: np.empty(block.length, np.float32) for name, block in self._blocks.items()}
        for name, vector in vectors.items():
            self._blocks[name].pull(vector)
        return vectors

    def status(self) -> StoreStatus:
        """See `protos.store.Store`."""
        with self._lock:
            tables = {name: table.status for name, table in self._tables.items()}
        return self._workers.status(tables, self._cuts.last)


def _load_candidates(checkpoint: Checkpoint, saved: TableSpec, table: SparseTable) -> None:
    """Loads what was counted of keys without a row, if the table goes on counting it."""
    if not table.counts_as(saved):
        if saved.admission is not None and table.spec.admission is not None:
            logger.warning(
                "counts of keys without a row start anew, admission was %s and is %s table=%s",
                saved.admission,
                table.spec.admission,
                saved.name,
            )
        return
    for _, rows in checkpoint.read_candidates(saved.name, table.shards):
        table.write_candidates(rows)
    for shard, counters in checkpoint.read_counters(saved.name, table.shards):
        table.write_counters(shard, counters)


def _no_rows(table: SparseTable) -> tuple[Keys, Values]:
    return np.empty(0, np.uint64), np.empty((0, table.spec.dim), np.float32)


def _difference(first: Any, second: Any) -> str:
    return ", ".join(
        f"{field} is {getattr(first, field)!r}, not {getattr(second, field)!r}"
        for field in first.__dataclass_fields__
        if getattr(first, field) != getattr(second, field)
    )


def _require_equal_spec(existing: TableSpec | DenseSpec, spec: TableSpec | DenseSpec) -> None:
    if existing != spec:
        raise SpecConflictError(
            f"{spec.name!r} exists with another spec: {_difference(existing, spec)}; "
            f"all workers of a job must declare the same"
        )


def _shape(spec: TableSpec | DenseSpec) -> dict[str, object]:
    if isinstance(spec, TableSpec):
        return {
            "dim": spec.dim,
            "num_shards": spec.num_shards,
            "optimizer": spec.optimizer.name,
        }
    return {"length": spec.length, "optimizer": spec.optimizer.name}


def _require_same_shape(saved: TableSpec | DenseSpec, spec: TableSpec | DenseSpec) -> None:
    if _shape(saved) != _shape(spec):
        raise SpecConflictError(
            f"{spec.name!r} was loaded with {_shape(saved)}, but the job declares {_shape(spec)}"
        )


def _require_loadable(saved: TableSpec | DenseSpec, spec: TableSpec | DenseSpec) -> None:
    try:
        _require_same_shape(saved, spec)
    except SpecConflictError as error:
        raise CheckpointError(f"the checkpoint does not fit: {error}") from error
