"""A batch as a module sees it: tensors, and the rows that its embeddings look up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_model import batch as numpy_batch
from ctr_model.lookup import Lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a table, as a leaf of the graph, and how they map to examples and slots.

    All tensors are where the weights are. `inverse` and `offsets` are as in `Lookup`.

    Attributes:
        weights: float32[N, D], the embeddings of the batch's unique keys.
        inverse: int32[L].
        offsets: int32[B * S + 1].
        num_slots: S.
        lookup: The same as arrays, for the kernels of the built-in models; None: PyTorch's operations do it,
            as on a device.
    """

    weights: Tensor
    inverse: Tensor
    offsets: Tensor
    num_slots: int
    lookup: Lookup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of B examples. Its tensors are shared and must not be written to.

    Attributes:
        dense: float32[B, num_dense], transformed and scaled by the schema.
        labels: float32[B], 1.0 for a click, else 0.0; None for rows without labels.
        rows: By table; for `Embedding`.
        weights: float32[B], sample weights; None: every example has weight 1. The loss is weighted for the
            module, which need not look at them.
    """

    dense: Tensor
    labels: Tensor | None
    rows: Mapping[str, Rows]
    weights: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return self.dense.shape[0]  # not len(): a program has no number for it


def batch_of(batch: numpy_batch.Batch, lookups: Mapping[str, Lookup], *, needs_grad: bool) -> Batch:
    """Returns a batch and its look-ups as tensors, without a copy."""
    return Batch(
        dense=tensor_of(batch.dense),
        labels=None if batch.labels is None else tensor_of(batch.labels),
        weights=None if batch.weights is None else tensor_of(batch.weights),
        rows={
            name: Rows(
                weights=tensor_of(lookup.rows).requires_grad_(needs_grad),
                inverse=tensor_of(lookup.inverse),
                offsets=tensor_of(lookup.offsets),
                num_slots=lookup.num_slots,
                lookup=lookup,
            )
            for name, lookup in lookups.items()
        },
    )


class _Writable:
    """An array that claims to be writable; nothing writes to it."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Returns a tensor of the same memory; PyTorch has none that is read-only, and warns of such arrays."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)
