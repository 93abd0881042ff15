"""A model in two halves, which may run in different processes: before the cut of its module, and behind it.

    front half   batch, rows --fronts--> activations ~~~.     .~~~ gradients --> gradients of the rows
    back half    activations of several batches, joined '--> loss --> dense gradient, gradients of activations

Together they compute `TorchModel.gradient`. Inputs and outputs are arrays on the CPU, whatever the device of
the back half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.checks import labels_of, require_batch, require_grads
from ctr_ps.ctr_model.parameters import Floats, Lookups, ModelInputError
from ctr_ps.ctr_model.torch import batch as tensors
from ctr_ps.ctr_model.torch.embedding import fronts_of
from ctr_ps.ctr_model.torch.model import TorchModel, described, gradients_of, in_float32

Outputs = Mapping[str, Sequence[NDArray[Any]]]
"""Outputs by layer: float32, bool or integers, [B, ...]."""

CROSSING_DTYPES = (torch.float32, torch.bool, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Values that cross the cut for a batch of B examples; `outputs` are those of the fronts."""

    dense: Floats
    labels: Floats  # float32[B], of T labels float32[B, T]
    outputs: Outputs

    @property
    def size(self) -> int:
        """B, the number of examples."""
        return len(self.dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackResult:
    """Result of the back half for a batch."""

    loss: float  # summed over its examples
    probabilities: Floats  # float32[B], of a click
    # gradients of each front's outputs, of the same shapes; float32[0] for an output without one
    grads: Mapping[str, Sequence[Floats]]


class FrontHalf:
    """The layers before the cut, for one thread."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self._own = model.workspace(1)
        self._fronts = fronts_of(self._own.module)

    def forward(self, batch: Batch, lookups: Lookups) -> "FrontPass":
        """Runs the fronts on a labelled batch, as in training; ModelInputError if anything does not match."""
        labels = labels_of(batch, self._model.num_labels)
        require_batch(self._model.schema, self._model.tables, batch, lookups, self._own)
        self._own.module.train()
        seen = tensors.batch_of(batch, lookups, needs_grad=True)
        with torch.enable_grad(), self._model.precision("cpu"):
            found = {
                name: returned(name, front(seen), batch.size)
                for name, front in self._fronts.items()
            }
        return FrontPass(seen, lookups, found, labels)


class FrontPass:
    """A forward pass of the front half."""

    def __init__(
        self,
        seen: tensors.Batch,
        lookups: Lookups,
        found: Mapping[str, Sequence[Tensor]],
        labels: Floats,
    ) -> None:
        self._seen = seen
        self._lookups = lookups
        self._found = found
        self.activations = Activations(
            dense=seen.dense.numpy(),
            labels=labels,
            outputs={name: [each.detach().numpy() for each in of] for name, of in found.items()},
        )

    def backward(self, grads: Mapping[str, Sequence[Floats]], out: Mapping[str, Floats]) -> None:
        """Overwrites `out`, by table float32[N, D], with the gradients of the rows, given the activations'.

        Raises ModelInputError if shapes do not match, before anything is written.
        """
        require_grads(self._lookups, out)
        roots, root_grads = [], []
        for name, outputs in self._found.items():
            for output, grad in zip(outputs, grads[name], strict=True):
                if not output.requires_grad or (output.numel() and not grad.size):
                    continue
                if grad.size != output.numel():
                    raise ModelInputError(
                        f"the gradient of {name} has {grad.size} numbers, expected {list(output.shape)}"
                    )
                roots.append(output)
                root_grads.append(tensors.tensor_of(grad).view(output.shape))
        leaves = [rows.weights for rows in self._seen.rows.values()]
        found = gradients_of(roots, root_grads, leaves)
        for name, of_rows in zip(self._seen.rows, found, strict=True):
            out[name][:] = 0.0 if of_rows is None else of_rows.numpy()


class BackHalf:
    """The module behind the cut, for one thread."""

    def __init__(self, model: TorchModel, *, device: str = "cpu") -> None:
        self._model = model
        self._device = torch.device(device)
        self._own = model.workspace(1, device=self._device)
        self._fronts = receive_instead(self._own.module)

    def gradient(
        self, params: Floats, parts: Sequence[Activations], dense_grad: Floats
    ) -> list[BackResult]:
        """Computes the gradients of the loss summed over all parts, in one pass; returns the result of each.

        Parts are joined in order, padded with zeros where they differ in other dimensions than the first.
        Overwrites `dense_grad` float32[P]; before that raises ModelInputError for activations of another
        model.
        """
        for part in parts:
            self.require(part)
        self._own.take(tensors.tensor_of(params))
        self._own.module.train()
        leaves = {
            name: [
                self._joined([part.outputs[name][i] for part in parts])
                for i in range(len(parts[0].outputs[name]))
            ]
            for name in self._fronts
        }
        for name, of in leaves.items():
            for leaf in of:
                leaf.requires_grad_(leaf.dtype == torch.float32)
            self._fronts[name].outputs = of
        seen = tensors.Batch(
            dense=self._joined([part.dense for part in parts]),
            labels=self._joined([part.labels for part in parts]),
            rows={},
        )
        with torch.enable_grad():
            found = self._own.loss_of(seen, self._own.output_of(seen))
        flat = [leaf for of in leaves.values() for leaf in of]
        parameters = self._own.parameters
        grads = found.gradients([*parameters, *flat])
        self._own.write(grads[: len(parameters)], torch.from_numpy(dense_grad))
        grads_of_leaves = iter(
            None if grad is None else grad.cpu().numpy() for grad in grads[len(parameters) :]
        )
        by_front = {name: [next(grads_of_leaves) for _ in of] for name, of in leaves.items()}
        places = [slice(*each) for each in pairwise(accumulate((p.size for p in parts), initial=0))]
        probabilities = self._own.checked(found.probabilities.cpu().numpy())
        return [
            BackResult(
                loss=found.losses[place].sum().item(),
                probabilities=probabilities[place],
                grads={
                    name: [
                        _unpadded(grad, place, output)
                        for grad, output in zip(of, part.outputs[name], strict=True)
                    ]
                    for name, of in by_front.items()
                },
            )
            for part, place in zip(parts, places, strict=True)
        ]

    def require(self, part: Activations) -> None:
        """Raises ModelInputError unless the activations fit this model."""
        expected = (part.size, self._model.schema.num_dense)
        others = (self._model.num_labels,) if self._model.num_labels > 1 else ()
        of_labels = (part.size, *others)
        if part.dense.shape != expected or part.labels.shape != of_labels:
            raise ModelInputError(
                f"activations have labels {list(part.labels.shape)} and dense inputs "
                f"{list(part.dense.shape)}, expected {list(of_labels)} and {list(expected)}"
            )
        if part.outputs.keys() != self._fronts.keys():
            raise ModelInputError(
                f"activations come from the layers {', '.join(sorted(part.outputs))}, but "
                f"{self._model.module_class.__name__} has the layers {', '.join(sorted(self._fronts))} "
                "before its cut"
            )
        for name, outputs in part.outputs.items():
            for output in outputs:
                if output.shape[:1] != (part.size,):
                    raise ModelInputError(
                        f"{name} returned a tensor of shape {list(output.shape)} for {part.size} examples, "
                        f"expected [{part.size}, ...]"
                    )

    def _joined(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        if len({array.ndim for array in arrays}) > 1:
            raise ModelInputError(
                f"arrays of one step have {sorted({array.ndim for array in arrays})} dimensions, expected "
                "the same number in all"
            )
        if len({array.shape[1:] for array in arrays}) > 1:  # they are padded to the largest
            shape = np.max([array.shape[1:] for array in arrays], axis=0)
            arrays = [
                np.pad(array, [(0, 0), *((0, missing) for missing in shape - array.shape[1:])])
                for array in arrays
            ]
        joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return tensors.tensor_of(joined).to(self._device)


class Received:
    """Replaces a front's `forward`: returns its received outputs."""

    def __init__(self) -> None:
        self.outputs: Sequence[Tensor] = ()

    def __call__(self, batch: tensors.Batch) -> Any:
        """Returns a tensor, or a tuple of them."""
        return self.outputs[0] if len(self.outputs) == 1 else tuple(self.outputs)


def receive_instead(module: nn.Module) -> dict[str, Received]:
    """Replaces the fronts of a module; returns the replacements by name."""
    received = {}
    for name, front in fronts_of(module).items():
        front.forward = received[name] = Received()
    return received


def returned(name: str, value: Any, size: int) -> list[Tensor]:
    """Returns the tensors that a front returned for `size` examples, lower precision as float32."""
    value = in_float32(value)
    found = [value] if isinstance(value, Tensor) else value
    is_known = isinstance(value, Tensor) or (isinstance(value, tuple) and len(value) > 1)
    if not is_known or not all(
        isinstance(each, Tensor) and each.shape[:1] == (size,) and each.dtype in CROSSING_DTYPES
        for each in found
    ):
        raise ModelInputError(
            f"{name}, before the cut, returned {described(value)}, expected a tensor or a tuple of two or "
            f"more tensors, each of float32, bool or integers and of first dimension {size}, the examples"
        )
    return list(found)


def _unpadded(grad: NDArray[Any] | None, place: slice, output: NDArray[Any]) -> Floats:
    if grad is None:
        return np.empty(0, np.float32)
    return grad[(place, *(slice(size) for size in output.shape[1:]))]
