"""Preparation of passes in the background: while one trains, the next one's keys are found, and rows pulled.

    batches --next pass_batches--> unique keys --without those of the running pass--> rows from the store

Rows that the running pass changes are not among them: the trainer adds these when it has ended.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.protos.chunking import VALUE_BYTES
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import RowStates, StateTransfer
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_worker.data.blocks import Batches, DataPosition
from ctr_ps.ps_worker.training.lookups import BatchKeys, keys_of_batch

ROW_BYTES = 8 + 1
"""Bytes of a row on the device besides its values: its key, and whether it was trained."""

PART_BYTES = 2**28
"""Rows that a call to the store transfers: a server holds a push until all of it has come."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """Rows of one table: keys uint64[R], ascending, and values float32[R, D + K], weights and state."""

    keys: Keys
    values: Values

    def take(self, where: NDArray[np.int64]) -> "PassRows":
        """Returns a copy of some rows, in their order."""
        return PassRows(self.keys[where], self.values[where])

    def states(self, spec: TableSpec) -> RowStates:
        """Returns a copy as the store takes it."""
        return RowStates(
            keys=self.keys,
            weights=np.ascontiguousarray(self.values[:, : spec.dim]),
            state=np.ascontiguousarray(self.values[:, spec.dim :]),
            optimizer=spec.optimizer.name,
        )


def places_in(sorted_keys: Keys, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns where in `sorted_keys` each key is, int64[N], and whether it is there, bool[N]."""
    places = np.searchsorted(sorted_keys, keys)
    places[places == sorted_keys.size] = 0
    if not sorted_keys.size:
        return places, np.zeros(keys.size, np.bool_)
    return places, sorted_keys[places] == keys


def parts(num_rows: int, width: int) -> Iterator[slice]:
    """Yields stretches of rows of about `PART_BYTES`."""
    step = max(1, PART_BYTES // (VALUE_BYTES * width))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def merged(keys: Keys, sources: Sequence[PassRows]) -> PassRows:
    """Returns the rows of `keys` uint64[R], ascending, each of which is in one of `sources`."""
    values = np.empty((keys.size, sources[0].values.shape[1]), np.float32)
    for source in sources:
        places, is_there = places_in(source.keys, keys)
        values[is_there] = source.values[places[is_there]]
    return PassRows(keys, values)


@dataclass(frozen=True, slots=True)
class PassBatch:
    """A batch with its position, if its source has one, and its keys."""

    batch: Batch
    position: DataPosition | None
    keys: BatchKeys


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A pass that may begin once the one before has ended."""

    batches: Sequence[PassBatch]  # in their order; none: the data has ended
    keys: Mapping[str, Keys]  # by table uint64[R], ascending
    # by table, the rows that the pass before does not have; taken out when the pass begins
    fresh: dict[str, PassRows]


class Preparation(AbstractContextManager["Preparation"]):
    """Prepares the passes of some batches, one ahead, in a thread of its own. Leaving the block ends it."""

    def __init__(
        self,
        batches: Batches,
        store: StateTransfer,
        *,
        tables: Sequence[EmbeddingTable],
        specs: Mapping[str, TableSpec],
        pass_batches: int | None,
        table_bytes: int | None,
    ) -> None:
        """Reads nothing yet; `batches` are read in the background alone.

        Without `pass_batches` all of them are one pass. `table_bytes` limits the tables of a pass on the
        device.
        """
        self._batches: Iterator[Batch | tuple[Batch, DataPosition]] = iter(batches)
        self._store = store
        self._tables = tables
        self._specs = specs
        self._pass_batches = pass_batches
        self._table_bytes = table_bytes
        self._is_stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "next-pass")

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, running: Mapping[str, Keys]) -> Future[PreparedPass]:
        """Begins to prepare the next pass; `running` are the keys of the one that trains meanwhile."""
        return self._pool.submit(self._prepare, running)

    def _prepare(self, running: Mapping[str, Keys]) -> PreparedPass:
        batches = []
        for each in islice(self._batches, self._pass_batches):
            if self._is_stopped.is_set():
                break
            batch, position = (each, None) if isinstance(each, Batch) else each
            batches.append(PassBatch(batch, position, keys_of_batch(batch, self._tables)))
        none = np.empty(0, np.uint64)
        keys = {
            table: np.unique(np.concatenate([none, *(each.keys.unique[table] for each in batches)]))
            for table in self._specs
        }
        self._require_memory(keys, sum(each.batch.size for each in batches))
        fresh = {}
        for table, column in keys.items():
            is_known = places_in(running.get(table, none), column)[1]
            fresh[table] = self._pulled(self._specs[table], column[~is_known])
        return PreparedPass(batches, keys, fresh)

    def _pulled(self, spec: TableSpec, keys: Keys) -> PassRows:
        """Reads rows from the store, part by part; the rest of them are undefined if it is to stop."""
        width = row_width(spec)
        values = np.empty((keys.size, width), np.float32)
        for part in parts(keys.size, width):
            if self._is_stopped.is_set():
                break
            rows = self._store.pull_state({spec.name: keys[part]}, []).result().rows[spec.name]
            values[part, : spec.dim] = rows.weights
            values[part, spec.dim :] = rows.state
        return PassRows(keys, values)

    def _require_memory(self, keys: Mapping[str, Keys], examples: int) -> None:
        needed = sum(
            column.size * (ROW_BYTES + 4 * row_width(self._specs[table]))
            for table, column in keys.items()
        )
        if self._table_bytes is not None and needed > self._table_bytes:
            raise UsageError(
                f"a pass of {examples} examples has {sum(column.size for column in keys.values())} rows of "
                f"{needed} bytes, but the device has room for {self._table_bytes} bytes of tables: set "
                f"device.pass_rows below {examples}, or raise device.memory_gb if the device has more"
            )


def row_width(spec: TableSpec) -> int:
    """Returns D + K, the numbers of a row: weights and optimizer state."""
    return spec.dim + optimizer_of(spec.optimizer).state_width(spec.dim)
