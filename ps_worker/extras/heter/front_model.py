"""The model of a CPU trainer: the layers before the cut, and heter trainers for the rest."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import EmbeddingTable, Model, StepResult, Workspace
from ctr_ps.ctr_model.parameters import Floats, Lookup, ModelInputError, Segment
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.extras.heter.dense_part import module_of
from ctr_ps.ps_worker.extras.heter.trainers import HeterTrainers

if TYPE_CHECKING:
    from ctr_ps.ctr_model.torch.halves import FrontHalf


class FrontModel:
    """A `Model` that trains without dense parameters: heter trainers have them. It does not predict."""

    segments: tuple[Segment, ...] = ()
    num_params = 0

    def __init__(self, model: Model, trainers: HeterTrainers) -> None:
        """Cuts the model.

        Raises:
            UsageError: If it cannot be cut.
        """
        self._model = module_of(model)
        self._trainers = trainers
        self.tables: tuple[EmbeddingTable, ...] = model.tables
        self.workspace(1)

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns the layers before the cut for one thread; see `Model`."""
        from ctr_ps.ctr_model.torch.halves import FrontHalf

        try:
            return _Workspace(FrontHalf(self._model))
        except ValueError as error:
            raise UsageError(f"the model cannot be cut for heter trainers: {error}") from error

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Raises ModelInputError: evaluation takes the whole model."""
        raise ModelInputError("half a model cannot predict: take the whole one")

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        """Computes the gradients of the rows; a heter trainer those of the dense parameters. See `Model`.

        Raises:
            UsageError: If the examples have weights.
            CtrPsError: If the heter trainer fails; see `HeterTrainers.train`.
        """
        if not isinstance(workspace, _Workspace):
            raise ModelInputError("the workspace belongs to another model")
        if batch.weights is not None:
            raise UsageError(
                "heter trainers take no sample weights: give batches without weights, or train without heter "
                "trainers"
            )
        step = workspace.front.forward(batch, lookups)
        sent = step.activations
        answer = self._trainers.train(sent.dense, sent.labels, sent.outputs)
        step.backward(answer.grads, sparse_grads)
        return StepResult(answer.loss, answer.probabilities)


class _Workspace:
    """The layers before the cut, for one thread."""

    max_batch_size = sys.maxsize

    def __init__(self, front: "FrontHalf") -> None:
        self.front = front
