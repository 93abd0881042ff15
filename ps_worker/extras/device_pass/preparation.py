"""Preparation of passes in the background: while one trains, the next one's keys are found, and rows pulled.

    batches --next pass_batches--> unique keys --without those of the running pass--> rows from the store

Rows that the running pass changes are not among them: the trainer adds these when it has ended.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import StateTransfer
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_worker.data.blocks import Batches, DataPosition
from ctr_ps.ps_worker.extras.device_pass.pass_rows import PassRows, new_keys, pull_rows, unique_of
from ctr_ps.ps_worker.training.lookups import BatchKeys, keys_of_batch

ROW_BYTES = 8 + 1
"""Bytes of a row on the device besides its values: its key, and whether it was trained."""


@dataclass(frozen=True, slots=True)
class PassBatch:
    """A batch with its position, if its source has one, and its keys."""

    batch: Batch
    position: DataPosition | None
    keys: BatchKeys


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A pass that may begin once the one before has ended.

    Attributes:
        batches: In their order; none: the data has ended.
        keys: By table uint64[R], ascending.
        fresh: By table, the rows that the pass before does not have; taken out when the pass begins.
    """

    batches: Sequence[PassBatch]
    keys: Mapping[str, Keys]
    fresh: dict[str, PassRows]


class Preparation:
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
        """Reads nothing yet.

        Args:
            batches: To train on; read in the background alone.
            store: Where rows are.
            tables: Of the model.
            specs: Of its tables, by name.
            pass_batches: Batches of a pass; None: all are one pass.
            table_bytes: Limit of the tables of a pass on the device; None: none.
        """
        self._batches: Iterator[Batch | tuple[Batch, DataPosition]] = iter(batches)
        self._store = store
        self._tables = tables
        self._specs = specs
        self._pass_batches = pass_batches
        self._table_bytes = table_bytes
        self._is_stopped = threading.Event()
        self._pool = ThreadPoolExecutor(1, "next-pass")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        keys = {
            table: unique_of([each.keys.unique[table] for each in batches]) for table in self._specs
        }
        self._require_memory(keys, sum(each.batch.size for each in batches))
        fresh = {
            table: pull_rows(
                self._store,
                self._specs[table],
                column,
                row_width(self._specs[table]),
                self._is_stopped.is_set,
            )
            for table, column in new_keys(keys, running).items()
        }
        return PreparedPass(batches, keys, fresh)

    def _require_memory(self, keys: Mapping[str, Keys], examples: int) -> None:
        """Raises UsageError if the tables of a pass do not fit the device."""
        needed = sum(
            column.size * (ROW_BYTES + 4 * row_width(self._specs[table]))
            for table, column in keys.items()
        )
        if self._table_bytes is not None and needed > self._table_bytes:
            raise UsageError(
                f"a pass of {examples} examples has {sum(column.size for column in keys.values())} rows of "
                f"{needed} bytes, and the device has room for {self._table_bytes} bytes of tables: set "
                f"device.pass_rows to less than {examples}, or device.memory_gb to more if it has more"
            )


def row_width(spec: TableSpec) -> int:
    """Returns D + K, the numbers of a row: weights and optimizer state."""
    return spec.dim + optimizer_of(spec.optimizer).state_width(spec.dim)
