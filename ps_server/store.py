"""All parameters that one process holds: the server's part of a cluster, or everything of an embedded run.

    push --check--> tables                       asynchronous modes: applied on arrival
    push --check--> aggregator --step--> tables  synchronous: applied once all parts of a step are there
    pull --wait for version--> tables

A push is checked as a whole before any part of it is applied. Tables lock their own shards; the store's
lock guards only who has come how far.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from protos.errors import (
    CheckpointError,
    ProtocolError,
    SpecConflictError,
    UnknownTableError,
    WaitTimeoutError,
)
from protos.gradients import Gradients, Values, require_finite, sum_gradients
from protos.partition import Keys
from protos.spec import DenseSpec, TableSpec
from protos.staleness import Staleness
from protos.store import Future, Missing, Pulled, Stamp, StoreStatus, Version
from ps_server.aggregation import StepAggregator
from ps_server.barrier import BarrierBook
from ps_server.checkpoint.digest import model_digest, shard_digest
from ps_server.checkpoint.manifest import Entry
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.writer import save_checkpoint, verify_token, write_part
from ps_server.table.dense_table import DenseTable
from ps_server.table.sparse_table import SparseTable
from ps_server.waiting import Answered, WaitingFuture

DEFAULT_WAIT_LIMIT_S = 600.0

T = TypeVar("T")
Table = TypeVar("Table", SparseTable, DenseTable)


@dataclass(frozen=True, slots=True)
class _VersionWaiter:
    version: Version
    future: WaitingFuture[Any]
    answer: Callable[[], Any]

    def resolve(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.answer())
        except Exception as error:  # carried to whoever waits, as an executor does
            self.future.set_exception(error)


class ParameterStore:
    """Tables, dense blocks, steps and barriers of one process: a `protos.store.Store`. Thread-safe."""

    def __init__(
        self,
        *,
        num_workers: int = 1,
        server_index: int = 0,
        num_servers: int = 1,
        wait_limit_s: float = DEFAULT_WAIT_LIMIT_S,
    ) -> None:
        """Makes an empty store.

        Args:
            num_workers: Workers of the job.
            server_index: Which server of the cluster this is.
            num_servers: Servers of the cluster; 1 holds everything.
            wait_limit_s: How long a pull or a barrier waits for other workers, in seconds.
        """
        self.server_index = server_index
        self.num_servers = num_servers
        self.num_workers = num_workers
        self._wait_limit_s = wait_limit_s
        self._tables: dict[str, SparseTable] = {}
        self._blocks: dict[str, DenseTable] = {}
        self._undeclared: set[str] = set()  # loaded, but not yet claimed by a job
        self._lock = threading.Lock()
        self.reset_membership()

    def reset_membership(self) -> None:
        """Forgets the workers, their steps and what they pushed, as for the next job; keeps parameters."""
        with self._lock:
            self._steps = StepAggregator(self.num_workers)
            self._step_examples: dict[Version, int] = {}
            self._barriers = BarrierBook(self.num_workers)
            self._barrier_futures: dict[tuple[str, int], WaitingFuture[Version]] = {}
            self._version_waiters: list[_VersionWaiter] = []
            self._examples: dict[int, int] = {}
            self._done: set[int] = set()
            self._staleness = Staleness()

    # Declaring

    def create_table(self, spec: TableSpec) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            table = self._tables.get(spec.name)
            if table is None:
                self._refuse_taken_name(spec.name)
                self._tables[spec.name] = self._new_table(spec)
            else:
                self._declare(table, spec)

    def create_dense(self, spec: DenseSpec) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            block = self._blocks.get(spec.name)
            if block is None:
                self._refuse_taken_name(spec.name)
                self._blocks[spec.name] = self._new_block(spec)
            else:
                self._declare(block, spec)

    def _new_table(self, spec: TableSpec) -> SparseTable:
        return SparseTable(spec, server_index=self.server_index, num_servers=self.num_servers)

    def _new_block(self, spec: DenseSpec) -> DenseTable:
        return DenseTable(spec, server_index=self.server_index, num_servers=self.num_servers)

    def _refuse_taken_name(self, name: str) -> None:
        if name in self._tables or name in self._blocks:
            raise SpecConflictError(f"{name!r} is both a table and a dense block: rename one")

    def _declare(self, existing: SparseTable | DenseTable, spec: Any) -> None:
        name = spec.name
        if name in self._undeclared:
            _require_same_shape(existing.spec, spec)
            existing.declare(spec)
            self._undeclared.discard(name)
        elif existing.spec != spec:
            raise SpecConflictError(
                f"{name!r} exists with another spec: {_difference(existing.spec, spec)}; "
                f"all workers of a job must declare the same"
            )

    # Moving data

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `protos.store.Store`; done when returned, unless it waits for `at`."""
        tables = {name: self._table(name) for name in keys}

        def answer() -> Pulled:
            version = self._steps.version  # read first: the rows may have more, never less
            rows = {name: table.pull(keys[name], missing) for name, table in tables.items()}
            return Pulled(rows, version)

        return self._at_version(at, answer)

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; `into` has the length of this process's pieces."""
        blocks = {name: self._block(name) for name in into}
        for name, block in blocks.items():
            if into[name].shape != (block.length,):
                raise ProtocolError(
                    f"pull of dense block {name!r} into shape {into[name].shape}, expected "
                    f"({block.length},)"
                )

        def answer() -> Version:
            version = self._steps.version
            for name, block in blocks.items():
                block.pull(into[name])
            return version

        return self._at_version(at, answer)

    def piece_length(self, block: str) -> int:
        """Returns the length of this process's piece of a dense block."""
        return self._block(block).length

    def push_grad(
        self, gradients: Gradients, stamp: Stamp, *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`."""
        self._steps.require_member(stamp.worker)
        self._check(gradients)
        if at is None:
            return Answered(self._apply_on_arrival(gradients, stamp))
        if stamp.examples < 1 and (gradients.sparse or gradients.dense):
            raise ProtocolError(
                f"worker {stamp.worker} pushed gradients for step {at} that says it has "
                f"{stamp.examples} examples: a step is divided by the examples of its stamps"
            )
        with self._lock:
            self._steps.add(stamp.worker, at, gradients)
            self._step_examples[at] = self._step_examples.get(at, 0) + stamp.examples
            self._count(stamp, version=at, batches=1)
            version, ready = self._advance(), self._take_ready()
        for waiter in ready:
            waiter.resolve()
        return Answered(version)

    def _apply_on_arrival(self, gradients: Gradients, stamp: Stamp) -> Version:
        with self._lock:
            steps = self._steps
            steps.begin_arrival(stamp.worker)
        try:
            self._apply(gradients)
        except BaseException:
            with self._lock:
                steps.end_arrival(0)
            raise
        with self._lock:
            self._count(stamp, version=steps.version, batches=stamp.batches)
            version, ready = steps.end_arrival(stamp.batches), self._take_ready()
        for waiter in ready:
            waiter.resolve()
        return version

    def _table(self, name: str) -> SparseTable:
        if name not in self._tables:
            raise UnknownTableError(f"no table {name!r}, there are: {sorted(self._tables)}")
        return self._tables[name]

    def _block(self, name: str) -> DenseTable:
        if name not in self._blocks:
            raise UnknownTableError(f"no dense block {name!r}, there are: {sorted(self._blocks)}")
        return self._blocks[name]

    def _check(self, gradients: Gradients) -> None:
        for name, grad in gradients.sparse.items():
            self._table(name).check(grad)
        for name, dense in gradients.dense.items():
            self._block(name).check(dense)
        require_finite(gradients)

    def _apply(self, gradients: Gradients) -> None:
        for name, grad in gradients.sparse.items():
            self._tables[name].push(grad)
        for name, dense in gradients.dense.items():
            self._blocks[name].push(dense)

    def _count(self, stamp: Stamp, *, version: Version, batches: int) -> None:
        """Counts a push that is applied to `version`; the caller holds the lock."""
        self._staleness = self._staleness.add(max(0, version - stamp.pulled), batches)
        self._examples[stamp.worker] = self._examples.get(stamp.worker, 0) + stamp.examples

    # Steps and barriers

    def _at_version(self, at: Version | None, answer: Callable[[], T]) -> Future[T]:
        if at is not None:
            with self._lock:
                if self._steps.version < at:
                    future: WaitingFuture[T] = WaitingFuture(
                        self._wait_limit_s, lambda: self._step_timeout(at)
                    )
                    self._version_waiters.append(_VersionWaiter(at, future, answer))
                    return future
        return Answered(answer())

    def _step_timeout(self, at: Version) -> WaitTimeoutError:
        with self._lock:
            step = self._steps.version
            behind = self._steps.behind(step)
        return WaitTimeoutError(
            f"version {at} did not come within {self._wait_limit_s:g} s: step {step} lacks the "
            f"gradients of workers {behind}; see their logs"
        )

    def _advance(self) -> Version:
        """Applies every step that is complete; the caller holds the lock."""
        while (parts := self._steps.take_complete_step()) is not None:
            examples = self._step_examples.pop(self._steps.version - 1)
            if examples:
                self._apply(_over_all_examples(sum_gradients(parts), examples))
        return self._steps.version

    def _take_ready(self) -> list[_VersionWaiter]:
        version = self._steps.version
        ready = [waiter for waiter in self._version_waiters if waiter.version <= version]
        self._version_waiters = [
            waiter
            for waiter in self._version_waiters
            if waiter.version > version and not waiter.future.cancelled()
        ]
        return ready

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        future: WaitingFuture[Version] = WaitingFuture(
            self._wait_limit_s, lambda: self._barrier_timeout(name, worker, future)
        )
        with self._lock:
            self._barriers.arrive(name, worker)
            self._barrier_futures[name, worker] = future
            self._steps.leave(worker, step)
            resolve = self._settle()
        resolve()
        return future

    def _barrier_timeout(self, name: str, worker: int, future: Future[Version]) -> WaitTimeoutError:
        with self._lock:
            missing = self._barriers.missing(name)
            # A worker that has come again waits on by its newer call.
            if self._barrier_futures.get((name, worker)) is future:
                self._barriers.give_up(name, worker)
                del self._barrier_futures[name, worker]
        return WaitTimeoutError(
            f"barrier {name!r}: workers {missing} did not come within {self._wait_limit_s:g} s; "
            f"see their logs"
        )

    def done(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            self._steps.require_member(worker)
            self._steps.leave(worker, step)
            self._barriers.leave(worker)
            self._done.add(worker)
            self._examples.setdefault(worker, 0)
            resolve = self._settle()
        resolve()

    def all_done(self) -> bool:
        """Whether every worker has left."""
        with self._lock:
            return len(self._done) >= self.num_workers

    def _settle(self) -> Callable[[], None]:
        """After a worker left steps: applies, releases, and returns what to do without the lock."""
        version = self._advance()
        released: list[WaitingFuture[Version]] = []
        for name, workers in self._barriers.take_released().items():
            for worker in workers:
                self._steps.rejoin(worker)
                released.append(self._barrier_futures.pop((name, worker)))
        ready = self._take_ready()

        def resolve() -> None:
            for waiter in ready:
                waiter.resolve()
            for future in released:
                if future.set_running_or_notify_cancel():
                    future.set_result(version)

        return resolve

    # Checkpoints

    def save(self, url: str, attachments: Mapping[str, bytes]) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        return save_checkpoint(
            url,
            write_parts=self.save_part,
            tables={name: table.spec for name, table in self._tables.items()},
            blocks={name: block.spec for name, block in self._blocks.items()},
            dense=self._dense_vectors(),
            attachments=attachments,
        )

    def save_part(self, folder: Path, token: str) -> list[Entry]:
        """Writes this process's shards and pieces into a folder, and returns what was written.

        Raises:
            CheckpointError: If the folder is not the one that holds the token, or cannot be written.
        """
        verify_token(folder, token)
        return write_part(
            folder, self.server_index, list(self._tables.values()), list(self._blocks.values())
        )

    def load(self, url: str) -> None:
        """See `protos.store.Store`; reads this process's shards and pieces."""
        checkpoint = Checkpoint.open(url)
        checkpoint.require((self._tables.keys() | self._blocks.keys()) - self._undeclared)
        tables = {name: self._load_table(checkpoint, name) for name in checkpoint.tables}
        blocks = {name: self._load_block(checkpoint, name) for name in checkpoint.blocks}
        with self._lock:
            self._undeclared |= (tables.keys() - self._tables.keys()) | (
                blocks.keys() - self._blocks.keys()
            )
            self._tables |= tables
            self._blocks |= blocks

    def _load_table(self, checkpoint: Checkpoint, name: str) -> SparseTable:
        saved = checkpoint.tables[name]
        spec = self._tables[name].spec if name in self._tables else saved
        _require_loadable(saved, spec)
        table = self._new_table(spec)
        for _, rows in checkpoint.read_shards(name, table.shards):
            table.write(rows)
        return table

    def _load_block(self, checkpoint: Checkpoint, name: str) -> DenseTable:
        saved = checkpoint.blocks[name]
        spec = self._blocks[name].spec if name in self._blocks else saved
        _require_loadable(saved, spec)
        block = self._new_block(spec)
        block.restore(checkpoint.read_dense(name, block.piece))
        return block

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
            return StoreStatus(
                version=self._steps.version,
                tables={name: table.status for name, table in self._tables.items()},
                examples=dict(self._examples),
                done=frozenset(self._done),
                staleness=self._staleness,
            )


def _over_all_examples(gradients: Gradients, examples: int) -> Gradients:
    """Returns the gradients with the step's number of examples: some workers may have sent nothing."""
    return Gradients(
        sparse={name: replace(grad, examples=examples) for name, grad in gradients.sparse.items()},
        dense={name: replace(grad, examples=examples) for name, grad in gradients.dense.items()},
    )


def _difference(first: Any, second: Any) -> str:
    return ", ".join(
        f"{field} is {getattr(first, field)!r}, not {getattr(second, field)!r}"
        for field in first.__dataclass_fields__
        if getattr(first, field) != getattr(second, field)
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
