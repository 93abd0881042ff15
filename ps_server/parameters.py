"""Tables and dense blocks of a store, those that a job declared and those that were loaded.

    declare or load --> tables, blocks <-- apply, shrink, take_snapshot

Tables and blocks lock themselves; the lock here guards only their names.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.chunking import require_values
from ctr_ps.protos.errors import (
    CheckpointError,
    OverloadedError,
    ProtocolError,
    SpecConflictError,
    SpecError,
    UnknownChangesError,
    UnknownTableError,
)
from ctr_ps.protos.gradients import Gradients, Values, require_finite
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.limits import MAX_TABLES, MAX_TOTAL_SHARDS
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import AdmissionSpec, DenseSpec, TableSpec
from ctr_ps.protos.store import (
    Applied,
    BlockState,
    Missing,
    ModelState,
    RowStates,
    Shrunk,
    Stretch,
    TableStatus,
    Version,
)
from ctr_ps.protos.store.moves import Moved, MovedCounters, MovedRows, Taken
from ctr_ps.protos.store.state_transfer import join_stretches, require_finite_state
from ctr_ps.ps_server.checkpoint.files.digest import shard_digest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.snapshot.before_step import BeforeStep
from ctr_ps.ps_server.snapshot.snapshots import StoreSnapshot, snapshot_all
from ctr_ps.ps_server.table import state_transfer
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.feature_life.admission import PASSES_BYTES, check_score_source
from ctr_ps.ps_server.table.memory.bfloat16 import are_bfloat16
from ctr_ps.ps_server.table.memory.memory_limit import MemoryLimit
from ctr_ps.ps_server.table.rows.regions import layout_of
from ctr_ps.ps_server.table.rows.statistics import Clock
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.spec_compat import (
    log_changes,
    require_claimable,
    require_equal_spec,
    require_loadable,
)


class Parameters:
    """Tables and dense blocks of one process. Thread-safe."""

    def __init__(
        self,
        *,
        num_workers: int,
        server_index: int,
        shard_map: ShardMap,
        clock: Clock,
        memory_limit: int | None = None,
    ) -> None:
        """Holds nothing yet; see `Engine` for the settings."""
        # token of the checkpoint that was saved or loaded last, since which tables record changes;
        # empty: no such checkpoint
        self.base = ""
        self._num_workers = num_workers
        self._server_index = server_index
        self._shard_map = shard_map
        self._next_map: ShardMap | None = None  # that a move leads to
        self._turn = 0  # of a table in the parts of a move
        self._counts_to_move: dict[int, Iterator[Moved]] = {}  # by target
        self._moved_blocks: dict[str, list[tuple[int, BlockState]]] = {}
        self._clock = clock
        self._tables: dict[str, SparseTable] = {}
        self._blocks: dict[str, DenseTable] = {}
        self._undeclared: set[str] = set()  # loaded, but not yet claimed by a job
        self._loaded_url = ""  # where that is from
        self._memory_limit = (
            None if memory_limit is None else MemoryLimit(memory_limit, self._table_bytes)
        )
        self._lock = threading.Lock()

    def create_table(self, spec: TableSpec) -> None:
        """See `protos.store.Store`."""
        with self._lock:
            table = self._tables.get(spec.name)
            check_score_source(spec, self._declared_spec(spec.admission))
            if table is None:
                self._refuse_taken_name(spec.name)
                # Status and digests must fit a message.
                shards = spec.num_shards + sum(
                    each.spec.num_shards for each in self._tables.values()
                )
                _require_few("tables", spec.name, len(self._tables) + 1, MAX_TABLES)
                _require_few("shards of tables", spec.name, shards, MAX_TOTAL_SHARDS)
                self._tables[spec.name] = self._new_table(spec)
            elif spec.name in self._undeclared:
                self._tables[spec.name] = self._claim(table, spec)
                self._undeclared.discard(spec.name)
            else:
                require_equal_spec(table.spec, spec)

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """See `protos.store.Store`; `values` are this process's piece."""
        piece = self._shard_map.piece_of(self._server_index, spec.length)
        require_values(spec, values, piece.stop - piece.start)
        with self._lock:
            block = self._blocks.get(spec.name)
            if block is None:
                self._refuse_taken_name(spec.name)
                _require_few("dense blocks", spec.name, len(self._blocks) + 1, MAX_TABLES)
                self._blocks[spec.name] = self._new_block(spec, values)
            elif spec.name in self._undeclared:
                require_claimable(block.spec, spec, self._loaded_url)
                block.declare(spec, values)
                self._undeclared.discard(spec.name)
            else:
                require_equal_spec(block.spec, spec)

    def _new_table(self, spec: TableSpec) -> SparseTable:
        table = SparseTable(
            spec,
            server_index=self._server_index,
            shard_map=self._shard_map,
            num_subscribers=self._num_workers if spec.records_changes else 0,
            clock=self._clock,
        )
        self._begin_move_of(table)
        return table

    def _new_block(self, spec: DenseSpec, given: Values | None) -> DenseTable:
        return DenseTable(spec, given, server_index=self._server_index, shard_map=self._shard_map)

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
        """Returns a loaded table with the spec that a job declares."""
        require_claimable(table.spec, spec, self._loaded_url)
        loaded = table.spec
        if layout_of(spec) != layout_of(loaded):
            claimed = self._new_table(spec)
            for shard in table.shards:
                claimed.write(table.export_shard(shard))
            claimed.take_candidates(table)
        else:
            claimed = table
            claimed.declare(spec)
            if spec.records_changes:
                claimed.record_changes(self._num_workers)
        log_changes(loaded, claimed)
        return claimed

    def reset_subscribers(self) -> None:
        """Marks every row as changed for the next job's workers, in tables that record changes."""
        for table in self._all_tables().values():
            if table.spec.records_changes:
                table.record_changes(self._num_workers)

    def declared(self) -> tuple[list[TableSpec], list[tuple[DenseSpec, Values | None]]]:
        """Returns the tables and dense blocks that were declared, these with the values that were given."""
        with self._lock:
            tables = [
                table.spec for name, table in self._tables.items() if name not in self._undeclared
            ]
            blocks = [
                (block.spec, block.given)
                for name, block in self._blocks.items()
                if name not in self._undeclared
            ]
        return tables, blocks

    def saved_specs(self) -> tuple[dict[str, TableSpec], dict[str, DenseSpec]]:
        """Returns the specs of the tables and dense blocks that are saved."""
        tables, blocks = self._saved()
        return (
            {table.spec.name: table.spec for table in tables},
            {block.spec.name: block.spec for block in blocks},
        )

    def _saved(self) -> tuple[list[SparseTable], list[DenseTable]]:
        """Returns what is saved: all that a job declared; before there is one, all that was loaded."""
        with self._lock:
            names = self._tables.keys() | self._blocks.keys()
            saved = names - self._undeclared or names
            return (
                [table for name, table in self._tables.items() if name in saved],
                [block for name, block in self._blocks.items() if name in saved],
            )

    def table_status(self) -> dict[str, TableStatus]:
        """Returns the sizes of the tables."""
        with self._lock:
            return {name: table.status for name, table in self._tables.items()}

    def _table_bytes(self) -> dict[str, int]:
        return {
            name: table.size_bytes + table.candidate_bytes
            for name, table in self.table_status().items()
        }

    def _all_tables(self) -> dict[str, SparseTable]:
        """Returns the tables by name, a copy: others may be declared meanwhile."""
        with self._lock:
            return dict(self._tables)

    def table(self, name: str) -> SparseTable:
        """Returns a table; raises UnknownTableError if none has that name."""
        if name not in self._tables:
            raise UnknownTableError(f"no table {name!r}, there are: {sorted(self._tables)}")
        return self._tables[name]

    def recording_table(self, name: str) -> SparseTable:
        """Returns a table that records changes; raises ProtocolError if it does not."""
        table = self.table(name)
        if not table.spec.records_changes:
            raise ProtocolError(
                f"table {name!r} does not record changes: declare it with records_changes=True"
            )
        return table

    def block(self, name: str) -> DenseTable:
        """Returns a dense block; raises UnknownTableError if none has that name."""
        if name not in self._blocks:
            raise UnknownTableError(f"no dense block {name!r}, there are: {sorted(self._blocks)}")
        return self._blocks[name]

    def check(self, gradients: Gradients) -> None:
        """Checks all gradients of a push, so that `apply` cannot fail on a part of them.

        Raises:
            GradientError: If a gradient does not fit its table or block, or is not finite.
            ProtocolError: If a table or block does not exist, or a key belongs to another server.
            OverloadedError: If it would create rows while tables are over the memory limit.
        """
        for name, grad in gradients.sparse.items():
            table = self.table(name)
            table.check(grad)
            if table.spec.admission is not None and table.spec.admission.table:
                self.table(table.spec.admission.table)
        for name, dense in gradients.dense.items():
            self.block(name).check(dense)
        require_finite(gradients)
        if self._memory_limit is not None:
            self._require_memory(
                self._memory_limit, {name: grad.keys for name, grad in gradients.sparse.items()}
            )

    def _require_memory(self, limit: MemoryLimit, pushed_keys: Mapping[str, Keys]) -> None:
        """Raises OverloadedError if rows of these keys, by table, would be created over the limit."""
        pushed = [(self._tables[name], keys) for name, keys in pushed_keys.items()]
        if not limit.is_exceeded(sum(keys.size * table.new_row_bytes for table, keys in pushed)):
            return
        for table, keys in pushed:
            if (key := table.key_of_new_row(keys)) is not None:
                raise OverloadedError(
                    f"server {self._server_index} refuses a new row, for key {key} of table "
                    f"{table.spec.name!r}: {limit.describe()}. Remove rows ([life] max_bytes, max_unseen, "
                    "ttl_s), admit fewer ([life] admission), use more servers, or raise --memory-limit"
                )

    def apply(
        self, gradients: Gradients, source: int, *, step: int, draw: int, staleness: int = 0
    ) -> None:
        """Applies gradients that passed `check`, from the worker `source`, or NOBODY.

        `step` is that of schedules, batches applied before; `draw` is of the rounding of bfloat16.
        """
        admits_by_score = []
        for name, grad in gradients.sparse.items():
            table = self._tables[name]
            if table.spec.admission is not None and table.spec.admission.table:
                scoring = self._tables[table.spec.admission.table]
                admits_by_score.append((scoring, table, grad))
            else:
                table.push(grad, source, step=step, draw=draw, staleness=staleness)
        for scoring, table, grad in admits_by_score:  # once this push is in the scores
            scores = scoring.scores(grad.keys)
            table.push(grad, source, scores, step=step, draw=draw, staleness=staleness)
        for name, dense in gradients.dense.items():
            self._blocks[name].push(dense, step=step, staleness=staleness)

    def row_width(self, table: str) -> int:
        """Returns the numbers of a table's row, weights and optimizer state."""
        found = self.table(table)
        return found.spec.dim + found.state_width

    def stretch_values(self, stretch: Stretch) -> int:
        """Returns the numbers of a stretch: weights, their optimizer state, and that of the block."""
        (slots, _), (scalars,) = self.block(stretch.block).state_shapes
        return (1 + slots) * (stretch.stop - stretch.start) + scalars

    def rows_with_state(self, keys: Mapping[str, Keys]) -> dict[str, RowStates]:
        """Returns rows by table; see `protos.store.StateTransfer`."""
        return {
            name: state_transfer.rows_of(self.table(name), column) for name, column in keys.items()
        }

    def check_state(self, state: ModelState) -> None:
        """Checks all of a push of state, so that `write_state` cannot fail on a part of it; as `check`."""
        for name, rows in state.rows.items():
            state_transfer.check_rows(self.table(name), rows)
        for name, block in state.blocks.items():
            state_transfer.check_block(self.block(name), block)
        require_finite_state(state)
        if self._memory_limit is not None:
            keys = {name: rows.keys for name, rows in state.rows.items()}
            self._require_memory(self._memory_limit, keys)

    def write_state(self, state: ModelState, *, draw: int) -> None:
        """Overwrites rows and pieces by state that passed `check_state`; `draw` as for `apply`."""
        for name, rows in state.rows.items():
            state_transfer.write_rows(self._tables[name], rows, draw)
        for name, block in state.blocks.items():
            self._blocks[name].restore(block)

    def before(self, gradients: Gradients, step: Version) -> BeforeStep:
        """Returns the values that a step with these gradients will change."""
        rows = {
            name: (grad.keys, self._tables[name].pull(grad.keys, Missing.INITIAL))
            for name, grad in gradients.sparse.items()
        }
        blocks = {name: np.empty(self._blocks[name].length, np.float32) for name in gradients.dense}
        for name, values in blocks.items():
            self._blocks[name].pull(values)
        return BeforeStep(step=step, rows=rows, blocks=blocks, num_evicted=self.num_evicted())

    def num_evicted(self) -> int:
        """Returns how many rows made room for others so far, in tables with an eviction."""
        with self._lock:
            tables = [
                table
                for table in self._tables.values()
                if table.spec.expiry is not None
                and (table.spec.expiry.max_rows or table.spec.expiry.max_bytes)
            ]
        return sum(table.status.evicted for table in tables)

    def shrink(self, *, max_norm: float | None, dry_run: bool) -> dict[str, Shrunk]:
        """See `protos.store.Store`; of this process's shards."""
        if max_norm is not None and not 0 <= max_norm < math.inf:
            raise ProtocolError(f"max_norm is {max_norm}, expected a finite number of at least 0")
        tables = self._all_tables()
        for name, table in tables.items():
            if table.spec.records_changes:
                raise ProtocolError(
                    f"table {name!r} has replicas, which keep removed rows: shrink the saved model in a job "
                    "with another mode"
                )
        return {
            name: table.shrink(max_norm=max_norm, dry_run=dry_run) for name, table in tables.items()
        }

    def prepare_snapshot(self) -> None:
        """Allocates memory for `take_snapshot`, while pushes are still applied."""
        for table in self._saved()[0]:
            table.prepare_snapshot()

    def take_snapshot(self, applied: Applied, base: str) -> StoreSnapshot:
        """Takes a snapshot of all that is saved, while nothing else changes it; see `snapshot_all`.

        Of a delta, `base` is the token of the save since which changes are taken; raises UnknownChangesError
        if these are not known.
        """
        tables, blocks = self._saved()
        if base and base != self.base:
            last = f"that of save {self.base}" if self.base else "none"
            raise UnknownChangesError(
                f"server {self._server_index} cannot save a delta of save {base}, as its last full save or "
                f"load is {last}: save a full checkpoint"
            )
        return snapshot_all(tables, blocks, applied, is_delta=bool(base))

    def load(
        self,
        checkpoint: Checkpoint,
        only: Collection[str],
        alone: Callable[[], AbstractContextManager[None]],
        on_shard: Callable[[], None],
    ) -> None:
        """Replaces tables and blocks by this process's shards and pieces of a checkpoint.

        Those that are not in `only`, if that names any, are initialised. `alone` is held while they are
        replaced, so that no gradients are applied.

        Raises:
            CheckpointError: If it was altered or does not fit; nothing was replaced.
            WaitTimeoutError: If pushes do not end in time; nothing was replaced.
        """
        checkpoint.require_trainable()
        declared = (self._tables.keys() | self._blocks.keys()) - self._undeclared
        checkpoint.require(declared, only)
        taken = frozenset(only) or checkpoint.tables.keys() | checkpoint.blocks.keys()
        tables = {
            name: self._load_table(checkpoint, name, on_shard)
            for name in checkpoint.tables.keys() & taken
        }
        blocks = {
            name: self._load_block(checkpoint, name) for name in checkpoint.blocks.keys() & taken
        }
        fresh = declared - taken
        for name in self._tables.keys() & fresh:
            tables[name] = self._new_table(self._tables[name].spec)
        for name in self._blocks.keys() & fresh:
            blocks[name] = self._new_block(self._blocks[name].spec, self._blocks[name].given)
        with alone(), self._lock:
            for name in self._undeclared:  # loaded earlier: it may be of another model
                self._tables.pop(name, None)
                self._blocks.pop(name, None)
            self._undeclared = (tables.keys() - self._tables.keys()) | (
                blocks.keys() - self._blocks.keys()
            )
            self._tables |= tables
            self._blocks |= blocks
            self._loaded_url = checkpoint.url
            self.base = "" if only else checkpoint.token
        for name in checkpoint.tables.keys() & taken:
            log_changes(checkpoint.tables[name], tables[name])

    def _load_table(
        self, checkpoint: Checkpoint, name: str, on_shard: Callable[[], None]
    ) -> SparseTable:
        saved = checkpoint.tables[name]
        # To read a model needs none of a job's settings; a job that wants them declares them. Admission
        # stays: it decides what keys without a row read, and counts them.
        unclaimed = replace(saved, records_changes=False, expiry=None)
        is_declared = name in self._tables and name not in self._undeclared
        spec = self._tables[name].spec if is_declared else unclaimed
        require_loadable(saved, spec, checkpoint.url)
        table = self._new_table(spec)
        is_as_saved = (saved.statistics is None) == (spec.statistics is None)
        for _, rows in checkpoint.read_shards(name, table.shards):
            table.write(rows)
            is_as_saved = is_as_saved and (not spec.is_bfloat16 or are_bfloat16(rows.weights))
            on_shard()
        if is_as_saved and not table.status.evicted:
            table.mark_clean()
        if table.counts_as(saved):  # keys without a row, in the same way
            for _, candidates in checkpoint.read_candidates(name, table.shards):
                table.write_candidates(candidates)
            for shard, counters in checkpoint.read_counters(name, table.shards):
                table.write_counters(shard, counters)
        return table

    def _load_block(self, checkpoint: Checkpoint, name: str) -> DenseTable:
        saved = checkpoint.blocks[name]
        is_declared = name in self._blocks and name not in self._undeclared
        spec = self._blocks[name].spec if is_declared else saved
        require_loadable(saved, spec, checkpoint.url)
        block = self._new_block(spec, self._blocks[name].given if is_declared else None)
        block.restore(checkpoint.read_dense(name, block.piece))
        return block

    # Moves of shards

    def begin_move(self, next_map: ShardMap) -> None:
        """Has `take_moved` return what of the shards that another server has in `next_map`."""
        with self._lock:
            if self._undeclared:
                raise ProtocolError(
                    f"tables {sorted(self._undeclared)} were loaded, but no job has declared them yet: move "
                    "shards when the workers have begun"
                )
            self._next_map, self._counts_to_move = next_map, {}
            self._moved_blocks = {}
            for table in self._tables.values():
                self._begin_move_of(table)

    def _begin_move_of(self, table: SparseTable) -> None:
        if (next_map := self._next_map) is not None:
            table.begin_move(
                [each for each in table.shards if next_map.server_of(each) != self._server_index]
            )

    def take_moved(self, server: int, max_bytes: int, *, with_counts: bool) -> Taken:
        """Returns what leaves for a server, and is new to the move, of at most about `max_bytes`.

        `with_counts`, once there is nothing else, all counters of these shards, once; nothing may change
        meanwhile.
        """
        rows: list[MovedRows] = []
        tables = list(self._all_tables().items())
        turn = self._turn % max(1, len(tables))
        for number, (name, table) in enumerate(tables[turn:] + tables[:turn], turn + 1):
            room = max(1, max_bytes // table.new_row_bytes)
            taken = table.take_moved(self._shards_for(server, table), room)
            for (found, removed), are_candidates in zip(taken, (False, True), strict=False):
                if size := found.keys.size + removed.size:
                    rows.append(_moved_rows(name, found, removed, are_candidates=are_candidates))
                    max_bytes -= size * table.new_row_bytes
                    room -= size
            if not room:
                self._turn = number  # the others come first next time
                return Taken(moved=Moved(rows), is_all=False)
        if rows or not with_counts:
            return Taken(moved=Moved(rows), is_all=not with_counts)
        counts = self._counts_to_move.setdefault(server, self._counts_for(server, max_bytes))
        moved = next(counts, None)
        return Taken(moved=moved or Moved(), is_all=moved is None)

    def _shards_for(self, server: int, table: SparseTable) -> Set[int]:
        if self._next_map is None or server == self._server_index:
            return frozenset()
        return frozenset(table.shards).intersection(
            self._next_map.shards_of(server, table.spec.num_shards)
        )

    def _counts_for(self, server: int, max_bytes: int) -> Iterator[Moved]:
        step = max(1, max_bytes // PASSES_BYTES) * PASSES_BYTES
        for name, table in self._all_tables().items():
            for shard in sorted(self._shards_for(server, table)):
                counters = table.counters_of_shard(shard)
                for start in range(0, counters.size, step):
                    part = counters[start : start + step]
                    yield Moved(counters=[MovedCounters(name, shard, part, start)])

    def put_moved(self, moved: Moved) -> None:
        """Takes over what another server had, to have it from `place` on.

        Raises ProtocolError if it does not fit the tables that were declared here.
        """
        with _refused_as_moved():
            for each in moved.rows:
                rows = Rows(each.keys, each.weights, each.state, each.statistics)
                table = self.table(each.table)
                table.put_moved(rows, each.removed, candidates=each.are_candidates)
            for counted in moved.counters:
                table, shard = self.table(counted.table), counted.shard
                if shard in table.shards or shard >= table.spec.num_shards:
                    raise ProtocolError(f"counters of shard {shard} were moved to a wrong server")
                table.write_counters(shard, counted.counters, start=counted.start)
        for name, start, stretch in moved.blocks:
            self._moved_blocks.setdefault(name, []).append((start, stretch))

    def require_room_for_moved(self, moved: Moved) -> None:
        """Raises OverloadedError if tables are over the memory limit, after `moved` was put."""
        limit = self._memory_limit
        added = sum(each.keys.size * self.table(each.table).new_row_bytes for each in moved.rows)
        if limit is not None and limit.is_exceeded(added):
            raise OverloadedError(
                f"shards that move here do not fit: {limit.describe()}. Move fewer, or raise --memory-limit"
            )

    def moved_blocks(self, shard_map: ShardMap, server_index: int) -> dict[str, DenseTable]:
        """Returns the blocks with the pieces of a server; raises ProtocolError if not all were put here."""
        blocks = {}
        for name, block in self._blocks.items():
            new = DenseTable(block.spec, server_index=server_index, shard_map=shard_map)
            if new.length:
                if name not in self._moved_blocks:
                    raise ProtocolError(f"no element of dense block {name!r} was moved here")
                with _refused_as_moved():
                    new.restore(join_stretches(name, self._moved_blocks[name]))
            if block.spec.values_digest:
                new.declare(block.spec, new.export().weights)
            blocks[name] = new
        return blocks

    def place(
        self, shard_map: ShardMap, server_index: int, blocks: Mapping[str, DenseTable] | None = None
    ) -> None:
        """Has the shards and pieces of a server in a map from now on, pieces those of `blocks`."""
        with self._lock:
            self._shard_map, self._server_index = shard_map, server_index
            self._next_map, self._counts_to_move = None, {}
            self._moved_blocks = {}
            self._blocks |= blocks or {}
            self.base = ""
            tables = list(self._tables.values())
        for table in tables:
            table.place(shard_map, server_index)

    def drop_others(self) -> None:
        """Frees the memory of rows that have moved away, or were put here and do not stay."""
        for table in self._all_tables().values():
            table.drop_others()

    def loads_by_place(self) -> NDArray[np.int64]:
        """Returns rows of all tables, their bytes, and keys of pulls and pushes so far, int64[3, places]."""
        loads = np.zeros((3, len(self._shard_map.owners)), np.int64)
        for table in self._all_tables().values():
            shards, rows, accesses = table.loads_of_shards()
            for load, each in zip(loads, (rows, rows * table.new_row_bytes, accesses), strict=True):
                np.add.at(load, shards % load.size, each)
        return loads

    def shard_digests(self) -> dict[tuple[str, int], bytes]:
        """Returns the digest of each shard of this process that is saved, by table and shard."""
        tables, _ = self._saved()
        return {
            (table.spec.name, shard): shard_digest(table.export_shard(shard))
            for table in tables
            for shard in table.shards
        }

    def dense_vectors(self) -> dict[str, Values]:
        """Returns copies of the pieces of the dense blocks that are saved, by name."""
        _, blocks = self._saved()
        vectors = {block.spec.name: np.empty(block.length, np.float32) for block in blocks}
        for block in blocks:
            block.pull(vectors[block.spec.name])
        return vectors


@contextmanager
def _refused_as_moved() -> Iterator[None]:
    """A caller is wrong that moves what does not fit, as no checkpoint is: a recovery refuses it again."""
    try:
        yield
    except CheckpointError as error:
        raise ProtocolError(f"what was moved here does not fit: {error}") from error


def _moved_rows(table: str, rows: Rows, removed: Keys, *, are_candidates: bool) -> MovedRows:
    return MovedRows(
        table=table,
        keys=rows.keys,
        weights=rows.weights,
        state=rows.state,
        statistics=rows.statistics,
        removed=removed,
        are_candidates=are_candidates,
    )


def _require_few(what: str, name: str, count: int, limit: int) -> None:
    if count > limit:
        raise SpecError(f"{name!r} would make {count} {what}, expected up to {limit}")
