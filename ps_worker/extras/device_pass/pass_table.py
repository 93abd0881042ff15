"""Tables and the dense block of a pass on a device, trained there by formulas of PyTorch.

keys of a batch --searchsorted--> rows of the pass --gather--> update --scatter--> rows of the pass
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model.torch.batch import tensor_of
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import BlockState
from ctr_ps.ps_worker.extras.device_pass.optimizers import update_of
from ctr_ps.ps_worker.extras.device_pass.pass_rows import PassRows

_SIGN = np.uint64(1 << 63)


@dataclass(frozen=True, slots=True, eq=False)
class GatheredRows:
    """Copies of rows of a table, on the device.

    Attributes:
        places: int64[N], where they are among those of the pass.
        values: float32[N, D + K].
        dim: D.
    """

    places: Tensor
    values: Tensor
    dim: int

    def weights(self) -> Tensor:
        """Returns a copy of the weights, float32[N, D]."""
        return self.values[:, : self.dim].clone()


class PassTable:
    """The rows of one table on a device. For one thread."""

    def __init__(self, spec: TableSpec, rows: PassRows, device: torch.device) -> None:
        """Copies rows to the device.

        Args:
            spec: Of the table.
            rows: Of the pass.
            device: Where they go.
        """
        self._spec = spec
        self._update = update_of(spec.optimizer)
        self._host_keys = rows.keys
        self._device = device
        self._keys = self._moved(rows.keys)
        self._values = torch.tensor(rows.values, device=device)
        self._is_trained = torch.zeros(rows.keys.size, dtype=torch.bool, device=device)

    @property
    def size_bytes(self) -> int:
        """Bytes on the device."""
        return int(sum(each.nbytes for each in (self._keys, self._values, self._is_trained)))

    def gather(self, keys: Keys) -> GatheredRows:
        """Returns copies of the rows of `keys` uint64[N], which are unique and all in the pass."""
        places = torch.searchsorted(self._keys, self._moved(keys))
        return GatheredRows(places, self._values.index_select(0, places), self._spec.dim)

    def update(self, rows: GatheredRows, grad: Tensor | None, examples: float, step: int) -> None:
        """Applies a gradient to rows that were gathered; None is zeros.

        Args:
            rows: As `gather` returned them.
            grad: float32[N, D], summed over examples.
            examples: Their number, each counted as its weight.
            step: Of the optimizer's schedule.
        """
        weights, state = rows.values[:, : rows.dim], rows.values[:, rows.dim :]
        grad = torch.zeros_like(weights) if grad is None else grad
        self._update(weights, state, grad, examples, step)
        self._values.index_copy_(0, rows.places, rows.values)
        self._is_trained[rows.places] = True

    def fetch(self) -> tuple[PassRows, NDArray[np.bool_]]:
        """Returns all rows as they are now, and bool[R], which of them were trained."""
        rows = PassRows(self._host_keys, self._values.cpu().numpy())
        return rows, self._is_trained.cpu().numpy()

    def _moved(self, keys: Keys) -> Tensor:
        """Returns keys on the device as int64, in their order: PyTorch does not search unsigned numbers."""
        return tensor_of((keys ^ _SIGN).view(np.int64)).to(self._device)


class PassBlock:
    """The dense block on a device, one long row. For one thread."""

    def __init__(self, spec: DenseSpec, state: BlockState, device: torch.device) -> None:
        """Copies the block to the device."""
        self._update = update_of(spec.optimizer)
        self._optimizer = spec.optimizer.name
        self._num_slots, self._length = state.element_state.shape
        row: Values = np.concatenate(
            [state.weights, state.element_state.reshape(-1), state.scalars]
        )
        self._row = torch.tensor(row, device=device).unsqueeze(0)  # [1, P + K]
        self.grad = torch.zeros(self._length, device=device)

    @property
    def weights(self) -> Tensor:
        """The parameters, float32[P], a view."""
        return self._row[0, : self._length]

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, with the gradient."""
        return int(self._row.nbytes + self.grad.nbytes)

    def update(self, examples: float, step: int) -> None:
        """Applies `grad`, summed over examples that count as their weights, at a step of the schedule."""
        self._update(
            self._row[:, : self._length],
            self._row[:, self._length :],
            self.grad.unsqueeze(0),
            examples,
            step,
        )

    def fetch(self) -> BlockState:
        """Returns the block as it is now."""
        row: Values = self._row[0].cpu().numpy().copy()
        weights, rest = row[: self._length], row[self._length :]
        slots = self._num_slots * self._length
        return BlockState(
            weights=weights,
            element_state=rest[:slots].reshape(self._num_slots, self._length),
            scalars=rest[slots:],
            optimizer=self._optimizer,
        )
