"""The dense part of a model on the device of a heter trainer: batches off the wire in, their answers out."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ctr_ps.ctr_model.models.model import Model, module_class_of
from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.protos.errors import ProtocolError, UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.wire.heter import Train, Trained
from ctr_ps.ps_worker.job.checks import missing_gpu

if TYPE_CHECKING:  # an extra, which only a model that was built with it needs
    from ctr_ps.ctr_model.torch.halves import Activations, BackResult
    from ctr_ps.ctr_model.torch.model import TorchModel


def module_of(model: Model) -> "TorchModel":
    """Returns a model that can be cut: one that is a module of PyTorch; raises UsageError if it is none."""
    if module_class_of(model) is None:
        raise UsageError(
            f"heter trainers need a PyTorch module, but the model is a {type(model).__name__}: use a module "
            "(docs/models.md), or no heter trainers"
        )
    module: TorchModel = model  # type: ignore[assignment]
    return module


class DensePart:
    """Computes dense gradients of joined batches. For one thread, but for `require`."""

    def __init__(self, model: Model, *, device: str = "cpu") -> None:
        """Builds the part behind the cut; raises UsageError if there is no cut or no such device."""
        module = module_of(model)
        if fault := missing_gpu(device, "heter trainer"):
            raise UsageError(f"the device {fault}")
        from ctr_ps.ctr_model.torch.halves import BackHalf

        try:
            self._back: BackHalf = BackHalf(module, device=device)
        except (ValueError, RuntimeError) as error:  # cannot be cut; no such GPU
            raise UsageError(f"the model cannot run on the device {device!r}: {error}") from error
        self._grad = np.empty(model.num_params, np.float32)
        self._one = np.empty(model.num_params, np.float32)

    def require(self, batch: Train) -> None:
        """Raises ProtocolError unless a batch has the activations of this model."""
        try:
            self._back.require(_activations(batch))
        except ModelInputError as error:
            raise ProtocolError(
                f"worker {batch.member.worker}: {error}; do all processes have the same model file?"
            ) from error

    def train(
        self, params: Values, batches: Sequence[Train]
    ) -> tuple[Values, int, Sequence[Trained]]:
        """Computes the gradient of the loss summed over the examples of all batches, joined in their order.

        A batch whose loss or gradients are not finite is left out of the sum, and answered with such a loss:
        what becomes of it is decided by its CPU trainer (training/non_finite.py).

        Returns:
            The dense gradient float32[P], which the next call overwrites; the number of examples in it; the
            answers.
        """
        parts = [_activations(batch) for batch in batches]
        with np.errstate(all="ignore"):
            results = self._back.gradient(params, parts, self._grad)
        if _are_finite(self._grad, results):
            return self._grad, sum(part.size for part in parts), list(map(_trained, results))
        return self._train_apart(params, parts)

    def _train_apart(
        self, params: Values, parts: Sequence["Activations"]
    ) -> tuple[Values, int, Sequence[Trained]]:
        self._grad[:] = 0.0
        examples = 0
        answers = []
        for part in parts:
            with np.errstate(all="ignore"):
                results = self._back.gradient(params, [part], self._one)
            (answer,) = map(_trained, results)
            if _are_finite(self._one, results):
                self._grad += self._one
                examples += part.size
            else:
                answer = Trained(
                    loss=np.nan, probabilities=answer.probabilities, grads=answer.grads
                )
            answers.append(answer)
        return self._grad, examples, answers


def _activations(batch: Train) -> "Activations":
    from ctr_ps.ctr_model.torch.halves import Activations

    return Activations(dense=batch.dense, labels=batch.labels, outputs=batch.outputs)


def _trained(result: "BackResult") -> Trained:
    return Trained(loss=result.loss, probabilities=result.probabilities, grads=result.grads)


def _are_finite(grad: Values, results: Sequence["BackResult"]) -> bool:
    """Whether a dense gradient is finite, and the losses and gradients of all batches."""
    of_activations = (each for result in results for of in result.grads.values() for each in of)
    return (
        all(np.isfinite(result.loss) for result in results)
        and bool(np.isfinite(grad).all())
        and all(np.isfinite(each).all() for each in of_activations)
    )
