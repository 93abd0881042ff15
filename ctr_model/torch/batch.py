"""A batch as a module sees it: tensors, and rows of its embeddings; and a check that it stays as it is."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctr_ps.ctr_model import batch as numpy_batch
from ctr_ps.ctr_model.parameters import Ints, Lookup, Lookups, ModelInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a table, as a leaf of the graph, and their mapping to examples, as in `Lookup`.

    On the CPU they are of the unique keys of a batch; on a device, one for each key of a slot.
    """

    weights: Tensor  # float32[N, D]; on a device float32[L, D]
    inverse: Tensor | None  # int32[L]; None on a device
    offsets: Tensor | None  # int32[B * S + 1]; None: every slot has one key
    num_slots: int  # S
    # the same as arrays, for the kernels of the built-in models; None on a device
    lookup: Lookup | None = None
    # int32[S], the most keys that an example has in a slot; None on the CPU
    longest: Ints | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of B examples. Its tensors are shared and must not be written to."""

    dense: Tensor  # float32[B, num_dense], transformed and scaled by the schema
    # float32[B], 1.0 for a click, else 0.0; of a schema of T labels float32[B, T]; None for rows without
    labels: Tensor | None
    rows: Mapping[str, Rows]  # by table; for `SlotEmbedding`
    # float32[B], sample weights, which the loss applies; None: every example has weight 1
    weights: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return self.dense.shape[0]  # not len(): a program has no number for it


def batch_of(batch: numpy_batch.Batch, lookups: Lookups, *, needs_grad: bool) -> Batch:
    """Returns a batch and its lookups as tensors, without a copy."""
    labels = batch.all_labels
    return Batch(
        dense=tensor_of(batch.dense),
        labels=None if labels is None else tensor_of(labels),
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


class Unchanged:
    """Detects writes of a forward pass to the module's parameters, its buffers, or the batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, layer._buffers, name)
            for prefix, layer in module.named_modules()
            for name in layer._buffers
        ]

    @contextmanager
    def required(self, batch: Batch) -> Iterator[None]:
        """Raises ModelInputError at the end of a block that has written to them."""
        buffers = [(name, layer.get(key)) for name, layer, key in self._buffers]
        of_batch = [("batch.dense", batch.dense), ("batch.labels", batch.labels)]
        watched = [
            (name, tensor, tensor._version)
            for name, tensor in (*self._parameters.items(), *buffers, *of_batch)
            if tensor is not None
        ]
        yield
        changed = [name for name, tensor, version in watched if tensor._version != version]
        replaced = [
            name
            for (name, old), (_, layer, key) in zip(buffers, self._buffers, strict=True)
            if _has_other_values(old, layer.get(key))
        ]
        if names := changed or replaced:
            raise ModelInputError(
                f"{type(self._module).__name__}.forward changed {', '.join(names)}: batch and "
                "parameters belong to the trainer, and each thread has its own buffers, which are not "
                "saved. Compute new tensors, and use LayerNorm instead of running means"
            )


def _has_other_values(old: Tensor | None, new: Tensor | None) -> bool:
    """Whether a buffer was replaced; one of another shape is a growing cache."""
    if old is new or old is None or new is None or old.shape != new.shape:
        return False
    return not torch.equal(old, new)
