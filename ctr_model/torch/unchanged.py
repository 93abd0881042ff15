"""Detects forward passes that write to shared or unsaved state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.torch.batch import Batch


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
                f"{type(self._module).__name__}.forward changed {', '.join(names)}: batch and parameters are "
                f"memory of the trainer, and buffers are not saved, and each thread has its own; compute a "
                f"new tensor, and normalize by LayerNorm instead of running means"
            )


def _has_other_values(old: Tensor | None, new: Tensor | None) -> bool:
    """Whether a buffer was replaced; one of another shape is a growing cache."""
    if old is new or old is None or new is None or old.shape != new.shape:
        return False
    return not torch.equal(old, new)
