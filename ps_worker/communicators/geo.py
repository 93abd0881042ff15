"""GEO training: every worker trains its own copy and exchanges changes every `k_steps` batches.

    training threads: pull, compute, push on the replica
    exchanger thread: take delta -> servers add it -> dense, rows that anyone changed -> merge into replica

As PaddlePaddle's GEO-SGD: a delta is divided by the number of workers that train, servers add up. Training
continues during an exchange, at most `k_steps` batches past the next one. The first exchanges come sooner,
when parameters change fastest: none is later than an eighth of the batches before it.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ctr_ps.protos.errors import JobError
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import Future, Member, Missing, Pulled, Store, Version
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.replica_table import ReplicaTable
from ctr_ps.ps_worker.communicators.communicator import Background, Communicator, StepPush
from ctr_ps.ps_worker.job.model import DENSE_BLOCK

logger = logging.getLogger(__name__)

WARM_UP = 8  # batches so far per batch of the interval to the next exchange, up to `k_steps`

MAX_ROWS_A_CALL = 1 << 20  # rows to request from each server at once; messages have smaller parts


class Replica:
    """A worker's own copy of the parameters. Other threads may train while deltas are taken and merged.

    local   what this worker trains: tables and a dense vector, with the job's optimizers
    base    what the servers had, as far as this worker knows

    delta = (local - base) / num_workers,  local = base = base + delta      taken, and pushed to the servers
    local += server - base,                base = server                    when others' changes arrive

    A taken delta leaves the copy as the servers will have it, except for others' changes; so a row that no
    other worker changed is not sent back, unless servers round it as bfloat16. Training before others'
    changes arrive is part of the next delta. A row that is in neither has its initial value in both, as on
    the servers: nothing is fetched before it changes.
    """

    def __init__(self, tables: Sequence[TableSpec], dense: DenseSpec, *, num_workers: int) -> None:
        """Makes a copy with initial values.

        `tables` and `dense` have the local optimizers; the servers add up the deltas of `num_workers`.
        """
        self._share = 1.0 / num_workers
        self._tables = {spec.name: ReplicaTable(spec) for spec in tables}
        self._dense_name = dense.name
        self.dense = DenseTable(dense)  # the local dense parameters
        self._dense_base = np.empty(dense.length, np.float32)
        self.dense.pull(self._dense_base)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.status.rows for table in self._tables.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of rows and indexes, without the dense vectors."""
        return sum(table.status.size_bytes for table in self._tables.values())

    def pull(self, keys: Mapping[str, Keys]) -> dict[str, Values]:
        """Returns local embeddings, float32[N, D] by table."""
        return {
            name: self._tables[name].pull(column, Missing.INITIAL) for name, column in keys.items()
        }

    def push(self, gradients: Gradients, *, step: int) -> None:
        """Applies gradients to the local copy, with the job's optimizers at a step of their schedules."""
        for name, grad in gradients.sparse.items():
            self._tables[name].push(grad, step=step)
        for dense in gradients.dense.values():
            self.dense.push(dense, step=step)

    def take_delta(self) -> Gradients:
        """Returns this worker's share of its changes since the last call, as sums of one example."""
        deltas = {name: table.take_deltas(self._share) for name, table in self._tables.items()}
        local = np.empty_like(self._dense_base)
        self.dense.pull(local)
        dense_delta = (local - self._dense_base) * np.float32(self._share)
        self._dense_base += dense_delta
        self.dense.add(self._dense_base - local)
        return Gradients(
            sparse={name: SparseGrad(keys, values, 1) for name, (keys, values) in deltas.items()},
            dense={self._dense_name: DenseGrad(dense_delta, 1)},
        )

    def merge_rows(self, rows: Mapping[str, tuple[Keys, Values]]) -> None:
        """Takes over the servers' rows, by table."""
        for name, (keys, values) in rows.items():
            self._tables[name].merge(keys, values)

    def merge_dense(self, values: Values) -> None:
        """Takes over the servers' dense parameters, float32[P]."""
        self.dense.add(values - self._dense_base)
        self._dense_base[:] = values


class GeoCommunicator(Communicator):
    """The worker's side of GEO training. Thread-safe."""

    def __init__(
        self,
        # the servers; their tables add pushed deltas, and record changes
        store: Store,
        *,
        member: Member,  # this process, in its worker's place
        num_workers: int,  # workers that have rows to train on
        tables: Sequence[TableSpec],  # with the optimizers of the local rows
        dense: DenseSpec,  # the dense block, with its local optimizer
        k_steps: int,  # batches between two exchanges
        max_replica_bytes: int,  # limit of the size of the replica's tables
        warm_up: int = WARM_UP,  # see `WARM_UP`; 0: `k_steps` from the start
        stall_limit_s: float = 600.0,  # longest that `push` and `flush` wait for an exchange
        # applied batches not counted by the version, as after resuming a synchronous run
        batches_before: int = 0,
    ) -> None:
        """Fetches the servers' parameters, and starts the exchanger.

        Raises CtrPsError if the servers do not answer, or hold more than fits.
        """
        super().__init__(member)
        self._store = store
        self._worker = member.worker
        self._tables = [spec.name for spec in tables]
        self._replica = Replica(tables, dense, num_workers=num_workers)
        self._k_steps = k_steps
        self._warm_up = warm_up
        self._max_replica_bytes = max_replica_bytes
        self._local = threading.local()
        self._is_alone = False
        self._server_dense = np.empty(dense.length, np.float32)
        self._background = Background(
            stall_limit_s=stall_limit_s, stalled="an exchange with the servers did not end"
        )
        self._changed = self._background.changed
        self._pending: list[int] = []  # numbers of batches since the last delta was taken
        self._pending_examples = 0
        self._unknown = 0  # batches trained here that `_pulled` does not count
        self._batches_before = batches_before
        self._exchanged = 0  # batches of this process that the servers have
        self._is_flushing = False
        self._pulled: Version = 0
        self._receive()
        self._background.start("exchanger", self._exchange_forever)

    def begin(self, thread_num: int) -> None:
        """Sets the number of training threads; any number may train."""
        self._is_alone = thread_num == 1

    def pull(self, keys: Mapping[str, Keys]) -> Future[Pulled]:
        return Answered(Pulled(self._replica.pull(keys), self._pulled))

    @contextmanager
    def params(self) -> Iterator[Values]:
        """Lends the replica's parameters, or a copy if several threads train."""
        if self._is_alone:
            with self._replica.dense.lend() as params:
                yield params
            return
        if not hasattr(self._local, "params"):
            self._local.params = np.empty_like(self._server_dense)
        self._replica.dense.pull(self._local.params)
        yield self._local.params

    def push(self, step: StepPush) -> None:
        """Applies gradients to the replica; blocks only while an exchange is a whole round late."""
        with self._changed:
            number = self._batches_before + self._pulled + self._unknown
            self._unknown += len(step.numbers)
        self._replica.push(step.gradients, step=number)
        with self._changed:
            self._background.require_health()
            self._pending += step.numbers
            self._pending_examples += step.examples
            if len(self._pending) >= self._interval:
                self._changed.notify_all()
                self._background.wait_until(lambda: len(self._pending) < 2 * self._interval)

    def flush(self) -> None:
        """Exchanges the remaining changes, and returns when the servers have all of them."""
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            self._background.wait_until(lambda: not self._is_flushing)

    def rejoin(self, version: Version) -> None:
        self._receive()
        logger.info(
            "replica rows=%d size_mb=%.1f", self._replica.rows, self._replica.size_bytes / 2**20
        )

    def close(self) -> None:
        """Stops the exchanger; changes not yet exchanged are lost."""
        self._background.close()

    @property
    def _interval(self) -> int:
        """Batches between the last exchange and the next one."""
        if not self._warm_up:
            return self._k_steps
        return min(self._k_steps, max(1, self._exchanged // self._warm_up))

    def _exchange_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        len(self._pending) >= self._interval
                        or self._is_flushing
                        or self._background.is_closed
                    )
                )
                if self._background.is_closed:
                    return
                is_flushing, has_steps = self._is_flushing, bool(self._pending)
            if has_steps:
                self._exchange()
            if is_flushing:
                with self._changed:
                    self._is_flushing = False
                    self._changed.notify_all()

    def _exchange(self) -> None:
        with self._changed:
            numbers, examples = self._pending, self._pending_examples
            self._pending, self._pending_examples = [], 0
            self._exchanged += len(numbers)
            self._changed.notify_all()
        push_id = self.push_ids.next(
            examples=examples, batches=len(numbers), pulled=self._pulled, whole=numbers
        )
        self._require_room()
        self._store.push_grad(self._replica.take_delta(), push_id).result()
        self._receive(len(numbers))

    def _receive(self, num_pushed: int = 0) -> None:
        """Merges the servers' changes; `num_pushed` of this worker's batches are new there."""
        version = self._store.pull_dense({DENSE_BLOCK: self._server_dense}).result()
        self._replica.merge_dense(self._server_dense)
        has_more = True
        while has_more:
            changed = self._store.pull_changed(
                self._tables, self._worker, max_rows=MAX_ROWS_A_CALL
            ).result()
            self._replica.merge_rows(changed.rows)
            self._require_room()
            has_more = changed.has_more
        with self._changed:
            self._pulled = version
            self._unknown -= num_pushed

    def _require_room(self) -> None:
        size_bytes = self._replica.size_bytes
        if size_bytes > self._max_replica_bytes:
            raise JobError(
                f"the replica of worker {self._worker} has {self._replica.rows} rows and "
                f"{size_bytes / 2**20:.0f} MB, more than strategy.geo.max_replica_mb = "
                f'{self._max_replica_bytes / 2**20:.0f}: raise it, or use mode = "async", in which '
                "workers keep no rows"
            )
