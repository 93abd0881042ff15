"""What the steps of a pass found, on its way from the device: the host goes on meanwhile."""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model.batch import Batch

MAX_AHEAD = 16
"""Steps that the host may be ahead of the device: the memory of their batches stays in use."""


Finish = Callable[[int, Batch, NDArray[np.float64]], int]
"""Takes the number of a step, its batch and its figures; returns the examples to count."""


class StepResults:
    """The results of steps, in their order. For one thread."""

    def __init__(self, finish: Finish) -> None:
        """`finish` is called for each step, once its figures are here."""
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
