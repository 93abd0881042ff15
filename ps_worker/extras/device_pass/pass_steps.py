"""The steps of a pass: each is given to the device as a whole, which decides whether its batch is skipped.

    next batches --pinned, in a thread--> step n on the device --figures--> progress, some steps later

The host never waits for the device within a step.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.torch import TorchModel
from ctr_ps.ctr_model.torch.device import DeviceBatch, DeviceModel
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.gradients import element_fault, row_fault
from ctr_ps.protos.keys import Keys
from ctr_ps.ps_worker.extras.device_pass.pass_table import PassBlock, PassTable, squares_of
from ctr_ps.ps_worker.extras.device_pass.preparation import PassBatch
from ctr_ps.ps_worker.run.plan import PassParts

MAX_AHEAD = 16
"""Steps that the host may be ahead of the device: the memory of their batches stays in use."""

STAGED_BATCHES = 4
"""Batches that are copied ahead to memory that the device reads by itself."""


class PassSteps:
    """Trains batches on rows and a dense block that are on a device. For one thread."""

    def __init__(self, parts: PassParts, device: torch.device) -> None:
        """Moves the module to the device."""
        specs = parts.specs
        self._device = device
        model = cast("TorchModel", parts.model)
        self._model = DeviceModel(model, device)
        self._num_labels = model.num_labels
        self._dims = {spec.name: spec.dim for spec in specs.tables}
        self._dense = specs.dense.name
        # of a step besides its probabilities: the loss, and a row or an element of each gradient
        self._num_figures = 1 + sum(1 + dim for dim in self._dims.values()) + 2
        self._push_ids = parts.push_ids
        self._progress = parts.progress
        self._non_finite = parts.non_finite
        self._clip_norm = specs.job.train.clip_norm
        # A schedule gives each step another rate, which a graph would keep.
        optimizers = [specs.dense.optimizer, *(spec.optimizer for spec in specs.tables)]
        self._has_graphs = specs.job.device.cuda_graph and not any(
            each.schedule for each in optimizers
        )
        self.batches = 0  # of this run, and those that it resumes: the step of schedules

    def train(
        self,
        tables: Mapping[str, PassTable],
        keys: Mapping[str, Keys],
        block: PassBlock,
        batches: Sequence[PassBatch],
        is_told_to_end: Callable[[], bool],
    ) -> tuple[list[int], int]:
        """Trains on the batches of a pass, unless told to end before the last; `keys` are those of the rows.

        Returns their numbers, and the examples of those not skipped. Raises DataError without labels, and
        GradientError as `NonFiniteBatches`, some steps after the batch.
        """
        numbers: list[int] = []
        results = StepResults(partial(self._finish, keys))
        graphs: dict[tuple[int, float], StepGraph] = {}
        try:
            for each, ahead in self._staged(batches):
                if is_told_to_end():
                    break
                if each.batch.labels is None:
                    raise DataError(
                        "training data has rows without labels: only evaluation and inference allow that"
                    )
                staged = ahead.result()
                numbers.append(self._push_ids.take(each.position))
                run = partial(self._step, tables, block, each.batch.weight, self.batches)
                if self._can_be_recorded(staged):
                    shape = each.batch.size, each.batch.weight
                    if shape not in graphs:
                        graphs[shape] = StepGraph(run, staged)
                    figures = graphs[shape].run(staged)
                else:
                    figures = run(staged.on(self._device))
                results.add(numbers[-1], each.batch, figures)
                self.batches += 1
        finally:  # after an error, too: an earlier batch may have failed
            results.finish()
        return numbers, results.examples

    def _can_be_recorded(self, batch: DeviceBatch) -> bool:
        """Whether other batches have the same shapes, and nothing waits for the device."""
        is_single = all(slots.offsets is None for slots in batch.slots.values())
        return self._has_graphs and is_single and not self._model.workspace.is_watched

    def _staged(
        self, batches: Iterable[PassBatch]
    ) -> Iterator[tuple[PassBatch, Future[DeviceBatch]]]:
        """Yields batches, each also as the device copies it, made ahead in a thread."""
        ahead: deque[tuple[PassBatch, Future[DeviceBatch]]] = deque()
        with ThreadPoolExecutor(1, "next-batch") as thread:
            for each in batches:
                of_batch = each.batch, each.slots, self._device
                staged = thread.submit(DeviceBatch.of, *of_batch, self._num_labels)
                ahead.append((each, staged))
                if len(ahead) > STAGED_BATCHES:
                    yield ahead.popleft()
            yield from ahead

    def _step(
        self,
        tables: Mapping[str, PassTable],
        block: PassBlock,
        weight: float,
        step: int,
        batch: DeviceBatch,
    ) -> Tensor:
        """Trains on a batch, unless it is not finite; returns its figures, float64[N], for `_finish`."""
        rows = {slots: of.rows.long() for slots, of in batch.slots.items()}
        places = {name: rows[self._model.slots[name]] for name in tables}
        leaves = {name: table.weights(places[name]) for name, table in tables.items()}
        result, grads = self._model.gradient(block.weights, batch, leaves, block.grad)
        sums = {name: table.summed(places[name], grads[name]) for name, table in tables.items()}
        figures = torch.cat(
            [
                result.loss.double().view(1),
                *(first_fault(sums[name], places[name]) for name in self._dims),
                first_fault(block.grad.unsqueeze(1)),
            ]
        )
        if weight:
            self._clip(places, sums, block.grad, weight)
            is_wanted = figures.isfinite().all()
            for name, table in tables.items():
                table.update(places[name], sums[name], weight, step, is_wanted)
            block.update(weight, step, is_wanted)
        return torch.cat([figures, result.probabilities.double()])

    def _clip(
        self,
        places: Mapping[str, Tensor],
        sums: Mapping[str, Tensor],
        dense_grad: Tensor,
        weight: float,
    ) -> None:
        """Scales the gradients of a batch, `sums` and `dense_grad`, in place, as clipping.py does."""
        if not self._clip_norm:
            return
        squares = [squares_of(places[name], of_rows) for name, of_rows in sums.items()]
        squares.append(dense_grad.double().square().sum())
        norm = torch.stack(squares).sum().sqrt() / weight
        scale = (self._clip_norm / norm).masked_fill(~(norm > self._clip_norm), 1.0).float()
        for each in (*sums.values(), dense_grad):
            each.mul_(scale)

    def _finish(
        self, keys: Mapping[str, Keys], number: int, batch: Batch, figures: NDArray[np.float64]
    ) -> int:
        """Counts a batch that the device has trained on; returns its examples, 0 if it was skipped."""
        loss, *rest = figures[: self._num_figures].tolist()
        faults = {}
        for name, dim in self._dims.items():
            (row, *values), rest = rest[: 1 + dim], rest[1 + dim :]
            if batch.weight and not all(map(math.isfinite, values)):
                faults[name] = row_fault(name, int(keys[name][int(row)]), values)
        element, value = rest
        if batch.weight and not math.isfinite(value):
            faults[self._dense] = element_fault(self._dense, int(element), value)
        if self._non_finite.has_faults(faults, loss, number):
            self._progress.skip()
            return 0
        assert batch.labels is not None
        probabilities = self._model.workspace.checked(
            figures[self._num_figures :].astype(np.float32)
        )
        self._progress.add(batch.labels, probabilities, loss, batch.weights)
        self._progress.on_batch(batch, probabilities)
        return batch.size


class StepGraph:
    """One step as a CUDA graph, recorded for a batch, and replayed for others of the same shapes and weight.

    The host launches all of its kernels at once.
    """

    def __init__(self, step: Callable[[DeviceBatch], Tensor], batch: DeviceBatch) -> None:
        """Records `step`, without running it, on the current device.

        Raises UsageError if the step waits for the device, or does anything else that cannot be recorded.
        """
        self._batch = batch.on(torch.device("cuda"))
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads go on to copy batches.
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._figures = step(self._batch)
                finally:
                    self._graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UsageError(
                "a step cannot be recorded as a CUDA graph: do not read values of tensors in forward "
                f"(.item(), if, print), or leave out device.cuda_graph ({str(error).splitlines()[0]})"
            ) from error
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, batch: DeviceBatch) -> Tensor:
        """Runs the step for a batch; returns what it returns, until the next run."""
        self._batch.write(batch)
        self._graph.replay()
        return self._figures


class StepResults:
    """The results of steps, in their order, on their way from the device. For one thread."""

    def __init__(self, finish: Callable[[int, Batch, NDArray[np.float64]], int]) -> None:
        """`finish` is called for each step, once its figures are here; it returns the examples to count."""
        self._finish = finish
        self._waiting: deque[tuple[int, Batch, Tensor, torch.cuda.Event | None]] = deque()
        self.examples = 0

    def add(self, number: int, batch: Batch, figures: Tensor) -> None:
        """Adds the next step, with figures float64[N] on the device, and finishes those that are here."""
        event = None
        if figures.device.type == "cuda":
            figures, event = figures.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        self._waiting.append((number, batch, figures, event))
        while self._waiting and (len(self._waiting) > MAX_AHEAD or self._is_here()):
            self._finish_first()

    def finish(self) -> None:
        """Waits for all steps, and finishes them."""
        while self._waiting:
            self._finish_first()

    def _is_here(self) -> bool:
        event = self._waiting[0][3]
        return event is None or event.query()

    def _finish_first(self) -> None:
        number, batch, figures, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        self.examples += self._finish(number, batch, figures.numpy())


def first_fault(values: Tensor, rows: Tensor | None = None) -> Tensor:
    """Returns of float32[N, D] one that is not finite, the first, or any: its row and values, float64[1 + D].

    `rows` int64[N] are their rows; None: they are numbered. Zeros if N = 0.
    """
    if not len(values):
        return values.new_zeros(1 + values.shape[1], dtype=torch.float64)
    place = values.isfinite().all(1).to(torch.uint8).argmin().view(1)
    row = place if rows is None else rows.index_select(0, place)
    return torch.cat([row.double(), values.index_select(0, place).view(-1).double()])
