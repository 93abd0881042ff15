"""The trainer of passes: rows go to a device, train there without a call to a store, and come back.

    prepared in the background --> to the device --> step, step, ... --> back to the store --> next pass
                                                                         `--rows that it has, too-----^

A step is that of step_loop.py with one thread: gather, forward and backward, non_finite.py, clip, update. A
write back is several pushes on arrival: rows, part by part, then the dense block, which completes the batches
of the pass. Until then version and progress are those of the pass before, and parameters are partly new.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model.models.model import StepResult
from ctr_ps.ctr_model.torch import TorchModel
from ctr_ps.ctr_model.torch.device import DeviceModel
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.store import ModelState, Store, Version
from ctr_ps.protos.store.state_transfer import require_finite_state
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.extras.device_pass.pass_table import PassBlock, PassTable
from ctr_ps.ps_worker.extras.device_pass.preparation import (
    PassBatch,
    PassRows,
    Preparation,
    PreparedPass,
    merged,
    parts,
    row_width,
)
from ctr_ps.ps_worker.job.model import ModelSpecs
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches

logger = logging.getLogger(__name__)


class PassTrainer:
    """Trains one model on one device, the only worker of its job. For one thread."""

    def __init__(
        self,
        model: TorchModel,
        specs: ModelSpecs,
        store: Store,
        push_ids: PushIds,
        *,
        progress: Progress,
        non_finite: NonFiniteBatches,
    ) -> None:
        """Moves the module to the device; see `ps_worker.run.guests.NewPassTrainer`."""
        job = specs.job
        self._device = torch.device(job.device.kind)
        self._model = DeviceModel(model, self._device)
        self._tables = model.tables
        self._store = store
        self._push_ids = push_ids
        self._specs = {spec.name: spec for spec in specs.tables}
        self._dense = specs.dense
        self._memory_bytes = job.device.memory_bytes
        self._pass_batches = job.device.pass_rows // job.train.batch_size or None  # None: one pass
        self._progress = progress
        self._non_finite = non_finite
        self._clip_norm = job.train.clip_norm
        self._batches = 0  # of this run, and those that it resumes: the step of schedules
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
        self._batches = self._store.status().batches
        limit = self._memory_bytes or memory_of(self._device)
        block = self._pulled_block()
        if limit is not None and block.size_bytes > limit:
            raise UsageError(
                f"the dense parameters have {block.size_bytes} bytes with their optimizer state, but the "
                f"device has room for {limit} bytes: raise device.memory_gb if the device has more"
            )
        preparation = Preparation(
            batches,
            self._store,
            tables=self._tables,
            specs=self._specs,
            pass_batches=self._pass_batches,
            table_bytes=None if limit is None else limit - block.size_bytes,
        )
        before: dict[str, PassRows] = {}
        with preparation:
            ahead = preparation.begin({})
            while (prepared := ahead.result()).batches and not is_told_to_end():
                ahead = preparation.begin(prepared.keys)
                before, version = self._run(prepared, before, block, version, is_told_to_end)
                if after_pass is not None:
                    after_pass()

    def _run(
        self,
        prepared: PreparedPass,
        before: dict[str, PassRows],
        block: PassBlock,
        version: Version,
        is_told_to_end: Callable[[], bool],
    ) -> tuple[dict[str, PassRows], Version]:
        """Trains a pass, whose tables leave the device with the end of this, before those of the next come.

        Takes the rows out of `prepared` and `before`, those of the pass before. Returns all rows of the pass
        as they are now, and the version.
        """
        start = time.monotonic()
        try:
            tables = self._moved(prepared, before)
            numbers, examples = self._steps(tables, block, prepared.batches, is_told_to_end)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of device memory in a pass of {len(prepared.batches)} batches: lower device.pass_rows "
                "or train.batch_size, and set device.memory_gb to at most the free memory "
                f"({str(error).splitlines()[0]})"
            ) from error
        answer = self._write_back(tables, block, numbers, examples, version)
        size_bytes = block.size_bytes + sum(table.size_bytes for table in tables.values())
        logger.info(
            "pass trained batches=%d examples=%d device_mb=%.1f seconds=%.2f",
            len(numbers),
            examples,
            size_bytes / 2**20,
            time.monotonic() - start,
        )
        return answer

    def _moved(self, prepared: PreparedPass, before: dict[str, PassRows]) -> dict[str, PassTable]:
        """Moves rows to the device: fresh ones, and those that the pass before has left on the host.

        They are taken out of `prepared` and `before`: the host does not keep them while the pass trains.
        """
        tables = {}
        for name, spec in self._specs.items():
            known = [before.pop(name)] if name in before else []
            rows = merged(prepared.keys[name], [*known, prepared.fresh.pop(name)])
            tables[name] = PassTable(spec, rows, self._device)
        return tables

    def _pulled_block(self) -> PassBlock:  # by itself: the host lets go of what it has pulled
        state = self._store.pull_state({}, [self._dense.name]).result()
        return PassBlock(self._dense, state.blocks[self._dense.name], self._device)

    def _steps(
        self,
        tables: Mapping[str, PassTable],
        block: PassBlock,
        batches: Sequence[PassBatch],
        is_told_to_end: Callable[[], bool],
    ) -> tuple[list[int], int]:
        """Trains on the batches of a pass, unless told to end before the last.

        Returns their numbers, and the examples of those not skipped.
        """
        numbers: list[int] = []
        examples = 0
        for each in batches:
            if is_told_to_end():
                break
            numbers.append(self._push_ids.take(each.position))
            examples += self._step(tables, block, each, numbers[-1])
            self._batches += 1
        return numbers, examples

    def _step(
        self, tables: Mapping[str, PassTable], block: PassBlock, each: PassBatch, number: int
    ) -> int:
        """Trains on a batch; returns its examples, 0 if it was skipped."""
        batch, examples = each.batch, each.batch.size
        if batch.labels is None:
            raise DataError(
                "training data has rows without labels: only evaluation and inference allow that"
            )
        gathered = {name: table.gather(each.keys.unique[name]) for name, table in tables.items()}
        rows = {
            name: self._model.rows(found.weights(), *each.keys.places(name))
            for name, found in gathered.items()
        }
        # What is not finite is told by non_finite.py, with the batch and the table: not by numpy before that.
        with np.errstate(all="ignore"):
            result, grads = self._model.gradient(block.weights, batch, rows, block.grad)
        if self._is_skipped(result, grads, block.grad, each, number):
            self._progress.skip()
            return 0
        if batch.weight:
            self._clip(grads, block.grad, batch.weight)
            for name, found in gathered.items():
                tables[name].update(found, grads[name], batch.weight, self._batches)
            block.update(batch.weight, self._batches)
        self._progress.add(batch.labels, result.probabilities, result.loss, batch.weights)
        return examples

    def _clip(self, grads: Mapping[str, Tensor | None], dense_grad: Tensor, weight: float) -> None:
        """Scales the gradients of a batch in place, as clipping.py does."""
        if not self._clip_norm:
            return
        there = [grad for grad in (*grads.values(), dense_grad) if grad is not None]
        squares = torch.stack([grad.double().square().sum() for grad in there])
        norm = float(squares.sum().sqrt()) / weight
        if norm > self._clip_norm:
            for grad in there:
                grad.mul_(float(np.float32(self._clip_norm / norm)))

    def _is_skipped(
        self,
        result: StepResult,
        grads: Mapping[str, Tensor | None],
        dense_grad: Tensor,
        each: PassBatch,
        number: int,
    ) -> bool:
        """Whether a batch is to be skipped; gradients come to the host only to say what is wrong."""
        there = {name: grad for name, grad in grads.items() if grad is not None}
        is_finite = [grad.isfinite().all() for grad in (*there.values(), dense_grad)]
        gradients, examples = Gradients(), each.batch.weight
        if not bool(torch.stack(is_finite).all()):
            gradients = Gradients(
                sparse={
                    name: SparseGrad(each.keys.unique[name], grad.cpu().numpy(), examples)
                    for name, grad in there.items()
                },
                dense={self._dense.name: DenseGrad(dense_grad.cpu().numpy(), examples)},
            )
        return self._non_finite.is_skipped(gradients, result.loss, number)

    def _write_back(
        self,
        tables: Mapping[str, PassTable],
        block: PassBlock,
        numbers: Sequence[int],
        examples: int,
        version: Version,
    ) -> tuple[dict[str, PassRows], Version]:
        """Pushes what a pass has trained, part by part; the last push completes its batches.

        Returns all rows of the pass as they are now, and the version. Raises GradientError if a number is
        infinite or not a number; nothing was pushed.
        """
        rows: dict[str, PassRows] = {}
        is_trained: dict[str, NDArray[np.bool_]] = {}
        for name, table in tables.items():
            rows[name], is_trained[name] = table.fetch()
        dense = ModelState(blocks={self._dense.name: block.fetch()})
        for state in chain(self._trained_parts(rows, is_trained), [dense]):
            require_finite_state(state)
        self.is_partly_written = True
        for state in self._trained_parts(rows, is_trained):
            push_id = self._push_ids.next(examples=0, batches=0, pulled=version, whole=())
            self._store.push_state(state, push_id).result()
        push_id = self._push_ids.next(
            examples=examples, batches=len(numbers), pulled=version, whole=numbers
        )
        version = self._store.push_state(dense, push_id).result()
        self.is_partly_written = False
        return rows, version

    def _trained_parts(
        self, rows: Mapping[str, PassRows], is_trained: Mapping[str, NDArray[np.bool_]]
    ) -> Iterator[ModelState]:
        """Yields copies of the rows that were trained, as many at a time as a push transfers."""
        for name, found in rows.items():
            spec, places = self._specs[name], np.flatnonzero(is_trained[name])
            for part in parts(places.size, row_width(spec)):
                yield ModelState({name: found.take(places[part]).states(spec)})


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
