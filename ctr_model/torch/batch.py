"""A batch as a module sees it: tensors, and the rows of its embeddings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctr_ps.ctr_model import batch as numpy_batch
from ctr_ps.ctr_model.parameters import Lookup, Lookups


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a table on a device, as a leaf of the graph, and their mapping to examples, as in `Lookup`."""

    weights: Tensor  # float32[N, D], the embeddings of the batch's unique keys
    inverse: Tensor  # int32[L]
    offsets: Tensor  # int32[B * S + 1]
    num_slots: int  # S
    # the same as arrays, for the kernels of the built-in models; None on a device
    lookup: Lookup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of B examples. Its tensors are shared and must not be written to."""

    dense: Tensor  # float32[B, num_dense], transformed and scaled by the schema
    labels: Tensor | None  # float32[B], 1.0 for a click, else 0.0; None for rows without labels
    rows: Mapping[str, Rows]  # by table; for `SlotEmbedding`
    # float32[B], sample weights, which the loss applies; None: every example has weight 1
    weights: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return self.dense.shape[0]  # not len(): a program has no number for it


def batch_of(batch: numpy_batch.Batch, lookups: Lookups, *, needs_grad: bool) -> Batch:
    """Returns a batch and its lookups as tensors, without a copy."""
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
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Returns a tensor of the same memory; PyTorch warns about read-only arrays."""
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)


def use_one_thread() -> None:
    """Limits PyTorch to the calling thread: more threads would contend, and change sums."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
