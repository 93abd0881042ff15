"""The trainer of passes: rows go to a device, train there without a call to a store, and come back.

    prepared in the background --> to the device --> step, step, ... --> back to the store --> next pass
                                                                         `--rows that it has, too-----^

A step is that of step_loop.py with one thread: gather, forward and backward, non_finite.py, clip, update.

A write back is several pushes on arrival: rows, part by part, then the dense block, which completes the
batches of the pass. Until then version and progress are those of the pass before, and parameters are partly
new.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ctr_ps.ctr_model.parameters import Ints
from ctr_ps.ctr_model.torch.batch import tensor_of
from ctr_ps.ctr_model.torch.device import slots_of
from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.environment import num_processors
from ctr_ps.protos.store import ModelState, PushId, RowStates, Version
from ctr_ps.protos.store.state_transfer import require_finite_state
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.extras.device_pass.pass_steps import PassSteps
from ctr_ps.ps_worker.extras.device_pass.pass_table import PassBlock, PassTable
from ctr_ps.ps_worker.extras.device_pass.preparation import (
    Preparation,
    PreparedPass,
    parts,
    row_bytes,
)
from ctr_ps.ps_worker.run.plan import PassParts

logger = logging.getLogger(__name__)

MOST_PUSHES = 8
"""Parts that are pushed at once. A server holds each until all of it has come, and takes fewer than 32."""


class PassTrainer:
    """Trains one model on one device, the only worker of its job. For one thread."""

    def __init__(self, parts: PassParts) -> None:
        """Moves the module to the device."""
        job = parts.specs.job
        self._device = torch.device(job.device.kind)
        self._steps = PassSteps(parts, self._device)
        self._tables = parts.model.tables
        self._store = parts.store
        self._push_ids = parts.push_ids
        self._specs = {spec.name: spec for spec in parts.specs.tables}
        self._dense = parts.specs.dense
        self._memory_bytes = job.device.memory_bytes
        self._pass_batches = job.device.pass_rows // job.train.batch_size or None  # None: one pass
        # the store may have a part of a pass: a write back has begun, and did not end
        self.is_partly_written = False

    def train(
        self,
        batches: Batches,  # gone through in their order, in a thread that looks ahead
        # called when the store has a pass, before the next one begins
        after_pass: Callable[[], None] | None = None,
        # whether no further step is to begin; the pass ends with those before
        is_told_to_end: Callable[[], bool] | None = None,
    ) -> None:
        """Trains on each batch once, and returns when the store has all that was trained.

        Raises:
            UsageError: If a pass does not fit the device; says both sizes.
            CtrPsError: What went wrong; the store has the passes before, unless `is_partly_written`.
        """
        is_told_to_end = is_told_to_end or (lambda: False)
        version = self._store.wait_version(0).result()
        self._steps.batches = self._store.status().batches
        limit = self._memory_bytes or memory_of(self._device)
        block = self._pulled_block()
        if limit is not None and block.size_bytes > limit:
            raise UsageError(
                f"the dense parameters have {block.size_bytes} bytes with their optimizer state, but the "
                f"device has room for {limit} bytes: raise device.memory_gb if the device has more"
            )
        tables: dict[str, PassTable] = {}
        pool = ThreadPoolExecutor(num_processors(), "pass")
        preparation = Preparation(
            batches,
            self._store,
            tables=self._tables,
            specs=self._specs,
            pool=pool,
            pass_batches=self._pass_batches,
            table_bytes=None if limit is None else limit - block.size_bytes,
        )
        with pool, preparation:
            ahead = preparation.begin({})
            while (prepared := ahead.result()).batches and not is_told_to_end():
                ahead = preparation.begin(prepared.keys)
                version = self._run(prepared, tables, block, version, is_told_to_end, pool)
                if after_pass is not None:
                    after_pass()

    def _run(
        self,
        prepared: PreparedPass,
        tables: dict[str, PassTable],
        block: PassBlock,
        version: Version,
        is_told_to_end: Callable[[], bool],
        pool: ThreadPoolExecutor,
    ) -> Version:
        """Trains a pass; returns the version. Replaces `tables`, which are those of the pass before."""
        start = time.monotonic()
        keys = {table.name: prepared.keys[slots_of(table)].keys.keys for table in self._tables}
        try:
            self._move(prepared, tables)
            numbers, examples = self._steps.train(
                tables, keys, block, prepared.batches, is_told_to_end
            )
            rows = {name: self._trained(name, table, keys[name]) for name, table in tables.items()}
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of device memory in a pass of {len(prepared.batches)} batches: lower device.pass_rows "
                "or train.batch_size, and set device.memory_gb to at most the free memory "
                f"({str(error).splitlines()[0]})"
            ) from error
        version = self._write_back(rows, block, numbers, examples, version, pool)
        size_bytes = block.size_bytes + sum(table.size_bytes for table in tables.values())
        logger.info(
            "pass trained batches=%d examples=%d device_mb=%.1f seconds=%.2f",
            len(numbers),
            examples,
            size_bytes / 2**20,
            time.monotonic() - start,
        )
        return version

    def _move(self, prepared: PreparedPass, tables: dict[str, PassTable]) -> None:
        """Replaces the tables of the pass before, first by the rows that both share, then by all rows.

        Takes the others out of `prepared`, and copies them by parts: neither side has them twice.
        """
        placed = {table.name: prepared.keys[slots_of(table)] for table in self._tables}
        kept = {
            name: tables.pop(name).take(self._on_device(placed[name].kept_from))
            for name in list(tables)
        }
        for name, of in placed.items():
            table = tables[name] = PassTable(self._specs[name], of.keys.keys.size, self._device)
            if name in kept:
                table.fill(self._on_device(of.kept), *kept.pop(name))
            fresh = prepared.fresh.pop(name)
            for part in parts(of.fresh.size, row_bytes(self._specs[name])):
                columns = (tensor_of(each[part]) for each in (fresh.weights, fresh.state))
                table.fill(
                    self._on_device(of.fresh[part]), *(each.to(self._device) for each in columns)
                )

    def _on_device(self, rows: Ints) -> Tensor:
        return tensor_of(rows).to(self._device).long()

    def _pulled_block(self) -> PassBlock:  # by itself: the host lets go of what it has pulled
        state = self._store.pull_state({}, [self._dense.name]).result()
        return PassBlock(self._dense, state.blocks[self._dense.name], self._device)

    def _trained(self, name: str, table: PassTable, keys: Keys) -> list[RowStates]:
        """Returns the rows that a pass has trained, in parts; raises GradientError if one is not finite."""
        rows, spec = table.trained(), self._specs[name]
        keys = keys[rows.cpu().numpy()]
        found = []
        for part in parts(keys.size, row_bytes(spec)):
            weights, state, is_finite = table.fetch(rows[part])
            states = RowStates(
                keys=keys[part], weights=weights, state=state, optimizer=spec.optimizer.name
            )
            if not is_finite:
                require_finite_state(ModelState({name: states}))
            found.append(states)
        return found

    def _write_back(
        self,
        rows: Mapping[str, Sequence[RowStates]],
        block: PassBlock,
        numbers: Sequence[int],
        examples: int,
        version: Version,
        pool: ThreadPoolExecutor,
    ) -> Version:
        """Pushes what a pass has trained, some parts at once; the last push completes its batches.

        Raises GradientError if the dense block is not finite; nothing was pushed.
        """
        dense = ModelState(blocks={self._dense.name: block.fetch()})
        require_finite_state(dense)

        def push(part: ModelState, push_id: PushId) -> None:
            self._store.push_state(part, push_id).result()

        self.is_partly_written = True
        waiting = (ModelState({name: part}) for name, of in rows.items() for part in of)
        while together := list(itertools.islice(waiting, MOST_PUSHES)):
            push_ids = [
                self._push_ids.next(examples=0, batches=0, pulled=version, whole=())
                for _ in together
            ]
            for _ in pool.map(push, together, push_ids):
                pass
        push_id = self._push_ids.next(
            examples=examples, batches=len(numbers), pulled=version, whole=numbers
        )
        version = self._store.push_state(dense, push_id).result()
        self.is_partly_written = False
        return version


def memory_of(device: torch.device) -> int | None:
    """Returns the bytes that tables may have by default; None: no limit.

    A fifth of what is free on a GPU is left for batches and the module. What PyTorch keeps of an earlier pass
    counts as free.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept) * 4 // 5
