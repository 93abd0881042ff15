"""Preparation of passes in the background: while one trains, the next one's keys are found, and rows pulled.

    batches --pass_keys.py--> keys of the pass --without those of the running one--> rows from the store
                         `--> rows of each batch

Rows that the running pass has, too, stay on the device.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.parameters import EmbeddingTable, Ints, SlotKeys, select_slots
from ctr_ps.ctr_model.torch.batch import tensor_of
from ctr_ps.ctr_model.torch.device import SlotRows, Slots, slots_of
from ctr_ps.protos.chunking import VALUE_BYTES
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.environment import num_processors
from ctr_ps.protos.runtime.jit import kernel, read_only
from ctr_ps.protos.spec import TableSpec
from ctr_ps.protos.store import RowStates, StateTransfer
from ctr_ps.protos.store.state_transfer import join_rows
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_worker.data.blocks import Batches, Position
from ctr_ps.ps_worker.extras.device_pass.pass_keys import NO_KEYS, PassKeys, pass_keys

PART_BYTES = 2**26
"""Rows that are copied, or transferred by a call to the store, at a time."""

_MIN_PART_ROWS = 2**14  # a call for fewer rows is not worth a thread


def parts(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yields stretches of rows, one for each processor, but of at most `PART_BYTES`."""
    share = max(_MIN_PART_ROWS, -(-num_rows // num_processors()))
    step = max(1, min(share, PART_BYTES // row_bytes))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


@dataclass(frozen=True, slots=True)
class PassBatch:
    """A batch with its position, if its source has one, and the rows of its slots in the pass."""

    batch: Batch
    position: Position | None
    slots: Mapping[Slots, SlotRows]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedKeys:
    """The keys of some slots in a pass, and where the rows of their tables are before it begins."""

    keys: PassKeys
    fresh: Ints  # int32[F], rows that the store has
    kept: Ints  # int32[M], rows that the pass before has,
    kept_from: Ints  # int32[M], and which of its rows they are


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """A pass that may begin once the one before has ended."""

    batches: Sequence[PassBatch]  # in their order; none: the data has ended
    keys: Mapping[Slots, PlacedKeys]
    fresh: dict[str, RowStates]  # by table, as the store has them; taken out when the pass begins


class Preparation(AbstractContextManager["Preparation"]):
    """Prepares the passes of some batches, one ahead, in a thread of its own. Leaving the block ends it."""

    def __init__(
        self,
        batches: Batches,
        store: StateTransfer,
        *,
        tables: Sequence[EmbeddingTable],
        specs: Mapping[str, TableSpec],
        pool: ThreadPoolExecutor,
        pass_batches: int | None,
        table_bytes: int | None,
    ) -> None:
        """Reads nothing yet; `batches` are read in the background alone.

        `pool` has the threads that find keys and pull rows. Without `pass_batches` all batches are one pass.
        `table_bytes` limits the tables of a pass on the device, with the rows that it keeps of the pass
        before.
        """
        self._batches: Iterator[Batch | tuple[Batch, Position]] = iter(batches)
        self._store = store
        self._tables = tables
        self._specs = specs
        self._pass_batches = pass_batches
        self._table_bytes = table_bytes
        self._is_stopped = threading.Event()
        self._pool = pool
        self._next = ThreadPoolExecutor(1, "next-pass")

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._next.shutdown(cancel_futures=True)

    def begin(self, running: Mapping[Slots, PlacedKeys]) -> Future[PreparedPass]:
        """Begins to prepare the next pass; `running` are the keys of the one that trains meanwhile."""
        return self._next.submit(self._prepare, running)

    def _prepare(self, running: Mapping[Slots, PlacedKeys]) -> PreparedPass:
        batches, positions = [], []
        for each in islice(self._batches, self._pass_batches):
            if self._is_stopped.is_set():
                break
            batch, position = (each, None) if isinstance(each, Batch) else each
            batches.append(batch)
            positions.append(position)
        if not batches:
            return PreparedPass([], {}, {})
        keys: dict[Slots, PlacedKeys] = {}
        rows: dict[Slots, Sequence[SlotRows]] = {}
        for table in self._tables:
            if (slots := slots_of(table)) not in keys:
                keys[slots], rows[slots] = self._keys_of(slots, batches, running.get(slots))
        of_table = {table.name: keys[slots_of(table)] for table in self._tables}
        self._require_memory(of_table, running, sum(batch.size for batch in batches))
        return PreparedPass(
            batches=[
                PassBatch(batch, position, {slots: of[i] for slots, of in rows.items()})
                for i, (batch, position) in enumerate(zip(batches, positions, strict=True))
            ],
            keys=keys,
            fresh={
                name: self._pulled(self._specs[name], placed.keys.keys[placed.fresh])
                for name, placed in of_table.items()
            },
        )

    def _keys_of(
        self, slots: Slots, batches: Sequence[Batch], running: PlacedKeys | None
    ) -> tuple[PlacedKeys, Sequence[SlotRows]]:
        """Returns the keys of slots in a pass, and the rows of each batch."""
        selected = list(self._pool.map(lambda batch: select_slots(batch, *slots), batches))
        before = NO_KEYS if running is None else running.keys
        keys, rows = pass_keys([each.keys for each in selected], self._pool, like=before)
        there = before.rows_of(keys, self._pool)
        fresh, kept = (np.flatnonzero(of).astype(np.int32) for of in (there < 0, there >= 0))
        placed = PlacedKeys(keys, fresh, kept, there[kept])
        return placed, list(self._pool.map(_slot_rows, selected, rows))

    def _pulled(self, spec: TableSpec, keys: Keys) -> RowStates:
        """Reads rows from the store, several parts at once; CancelledError if it is to stop."""

        def pull(part: slice) -> RowStates:
            if self._is_stopped.is_set():
                raise CancelledError
            return self._store.pull_state({spec.name: keys[part]}, []).result().rows[spec.name]

        found = list(self._pool.map(pull, parts(keys.size, row_bytes(spec))))
        return join_rows(spec.name, found) if found else pull(slice(0))

    def _require_memory(
        self,
        tables: Mapping[str, PlacedKeys],
        running: Mapping[Slots, PlacedKeys],
        examples: int,
    ) -> None:
        """Raises UsageError unless a pass fits, and before it the pass that runs, beside what both share."""
        needed = self._device_bytes(tables)
        before = self._device_bytes(
            {of.name: running[slots_of(of)] for of in self._tables if slots_of(of) in running}
        )
        kept = sum(table.kept.size * row_bytes(self._specs[name]) for name, table in tables.items())
        if self._table_bytes is not None and max(needed, before) + kept > self._table_bytes:
            num_rows = sum(table.keys.keys.size for table in tables.values())
            raise UsageError(
                f"a pass of {examples} examples does not fit on the device: its {num_rows} rows need "
                f"{needed} bytes, those of the previous pass {before}; the larger number, plus {kept} bytes "
                f"for the rows in both passes, is more than the {self._table_bytes} bytes for tables. Set "
                f"device.pass_rows below {examples}, or raise device.memory_gb if the device has more"
            )

    def _device_bytes(self, tables: Mapping[str, PlacedKeys]) -> int:
        return sum(
            (table.keys.keys.size + 1) * device_bytes(self._specs[name])
            for name, table in tables.items()
        )


def _slot_rows(slots: SlotKeys, rows: Ints) -> SlotRows:
    longest = np.zeros(slots.num_slots, np.int32)
    is_single = _longest(read_only(slots.offsets), longest)
    offsets = None if is_single else tensor_of(slots.offsets)
    return SlotRows(tensor_of(rows), offsets, longest)


@kernel
def _longest(offsets: Ints, longest: Ints) -> bool:
    """Raises `longest` int32[S] to the most keys of each slot; returns whether all have one key."""
    slot, is_single = 0, True
    for i in range(offsets.size - 1):
        count = offsets[i + 1] - offsets[i]
        is_single &= count == 1
        longest[slot] = max(longest[slot], count)
        slot = slot + 1 if slot + 1 < longest.size else 0
    return is_single


def row_bytes(spec: TableSpec) -> int:
    """Returns the bytes of a row, 4 (D + K): weights and optimizer state."""
    return VALUE_BYTES * (spec.dim + optimizer_of(spec.optimizer).state_width(spec.dim))


def device_bytes(spec: TableSpec) -> int:
    """Returns the bytes of a row on the device: with its gradient, its number, and whether it was trained."""
    return row_bytes(spec) + VALUE_BYTES * spec.dim + 8 + 1
