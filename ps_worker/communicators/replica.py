"""A worker's own copy of the parameters, for training between two exchanges with the servers.

    local   what this worker trains: tables and a dense vector, with the job's optimizers
    base    what the servers had, as far as this worker knows

    delta = (local - base) / num_workers,  local = base = base + delta      taken, and pushed to the servers
    local += server - base,                base = server                    when others' changes arrive

A taken delta leaves the copy as the servers will have it, except for others' changes; so a row that no other
worker changed is not sent back. Training before others' changes arrive is part of the next delta. A row that
is in neither has its initial value in both, as on the servers: nothing is fetched before it changes.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.replica_table import ReplicaTable


class Replica:
    """The copy of one worker. Other threads may train while deltas are taken and merged."""

    def __init__(self, tables: Sequence[TableSpec], dense: DenseSpec, *, num_workers: int) -> None:
        """Makes a copy with initial values.

        `tables` and `dense` have the local optimizers; the servers add up the deltas of `num_workers`.
        """
        self._share = 1.0 / num_workers
        self._tables = {spec.name: ReplicaTable(spec) for spec in tables}
        self._dense_name = dense.name
        self._dense = DenseTable(dense)
        self._dense_base = np.empty(dense.length, np.float32)
        self._dense.pull(self._dense_base)

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

    def pull_dense(self, out: Values) -> None:
        """Copies the local dense parameters to `out` float32[P]."""
        self._dense.pull(out)

    def lend_dense(self) -> AbstractContextManager[Values]:
        """Lends the local dense parameters float32[P] to one thread; merges and pushes wait for it."""
        return self._dense.lend()

    def push(self, gradients: Gradients, *, step: int) -> None:
        """Applies gradients to the local copy, with the job's optimizers at a step of their schedules."""
        for name, grad in gradients.sparse.items():
            self._tables[name].push(grad, step=step)
        for dense in gradients.dense.values():
            self._dense.push(dense, step=step)

    def take_delta(self) -> Gradients:
        """Returns this worker's share of its changes since the last call, as sums of one example."""
        deltas = {name: table.take_deltas(self._share) for name, table in self._tables.items()}
        return Gradients(
            sparse={name: SparseGrad(keys, values, 1) for name, (keys, values) in deltas.items()},
            dense={self._dense_name: DenseGrad(self._take_dense(), 1)},
        )

    def _take_dense(self) -> Values:
        local = np.empty_like(self._dense_base)
        self._dense.pull(local)
        delta = (local - self._dense_base) * np.float32(self._share)
        self._dense_base += delta
        self._dense.add(self._dense_base - local)
        return delta

    def merge_rows(self, rows: Mapping[str, tuple[Keys, Values]]) -> None:
        """Takes over the servers' rows, by table."""
        for name, (keys, values) in rows.items():
            self._tables[name].merge(keys, values)

    def merge_dense(self, values: Values) -> None:
        """Takes over the servers' dense parameters, float32[P]."""
        self._dense.add(values - self._dense_base)
        self._dense_base[:] = values
