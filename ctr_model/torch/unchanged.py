"""Detects forward passes that write to shared or unsaved state."""

from collections.abc import Iterator, Sequence
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
        buffers = [layer.get(name) for _, layer, name in self._buffers]
        watched = [*self._parameters.values(), *buffers, batch.dense, batch.labels]
        before = _versions(watched)
        yield
        after = _versions(watched)
        if after != before:
            names = [
                *self._parameters,
                *(name for name, _, _ in self._buffers),
                "batch.dense",
                "batch.labels",
            ]
            self._refuse(
                [
                    name
                    for name, *each in zip(names, before, after, strict=True)
                    if each[0] != each[1]
                ]
            )
        changed = [
            name
            for (name, layer, key), old in zip(self._buffers, buffers, strict=True)
            if _has_other_values(old, layer.get(key))
        ]
        if changed:
            self._refuse(changed)

    def _refuse(self, names: Sequence[str]) -> None:
        raise ModelInputError(
            f"{type(self._module).__name__}.forward changed {', '.join(names)}: batch and parameters are "
            f"memory of the trainer, and buffers are not saved, and each thread has its own; compute a new "
            f"tensor, and normalize by LayerNorm instead of running means"
        )


def _versions(tensors: Sequence[Tensor | None]) -> list[int | None]:
    return [None if each is None else each._version for each in tensors]


def _has_other_values(old: Tensor | None, new: Tensor | None) -> bool:
    """Whether a buffer was replaced; one of another shape is a growing cache."""
    if old is new or old is None or new is None or old.shape != new.shape:
        return False
    return not torch.equal(old, new)
