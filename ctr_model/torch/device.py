"""A module on a device: tensors in, gradients as tensors out; only the data of a batch is transferred."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import StepResult
from ctr_ps.ctr_model.parameters import Ints
from ctr_ps.ctr_model.torch import batch as tensors
from ctr_ps.ctr_model.torch.model import TorchModel


class DeviceModel:
    """The module of a `TorchModel` on a device. For one thread."""

    def __init__(self, model: TorchModel, device: torch.device) -> None:
        self._device = device
        self._workspace = model.workspace(1, device=device)

    def rows(self, weights: Tensor, inverse: Ints, offsets: Ints, num_slots: int) -> tensors.Rows:
        """Returns rows gathered on the device, as a leaf of the graph; see `tensors.Rows`."""
        return tensors.Rows(
            weights=weights.requires_grad_(),
            inverse=self._moved(inverse),
            offsets=self._moved(offsets),
            num_slots=num_slots,
        )

    def gradient(
        self,
        params: Tensor,
        batch: Batch,
        rows: Mapping[str, tensors.Rows],
        dense_grad: Tensor,
    ) -> tuple[StepResult, dict[str, Tensor | None]]:
        """Computes the gradients of the loss summed over the examples; `params` are on the device.

        Overwrites `dense_grad` float32[P] there; returns, by table, those float32[N, D] of `rows`, None for
        zeros.
        """
        self._workspace.take(params)
        seen = tensors.Batch(
            dense=self._moved(batch.dense),
            labels=None if batch.labels is None else self._moved(batch.labels),
            weights=None if batch.weights is None else self._moved(batch.weights),
            rows=rows,
        )
        return self._workspace.gradient(seen, dense_grad)

    def _moved(self, array: NDArray[np.float32] | Ints) -> Tensor:
        return tensors.tensor_of(array).to(self._device)
