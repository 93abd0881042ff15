"""Base class of the models: everything except their formulas.

    predict     checks -> forward -> probabilities of the logits
    gradient    checks -> forward -> loss, and its gradient by the logits -> backward

A model derives from `ClickModel`, declares its tables and segments in `__init__`, and implements `forward`
and `backward`.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.losses import SIGMOID, SOFTMAX, Loss
from ctr_model.layers.products import NewProduct, float32_product
from ctr_model.lookup import Lookup
from ctr_model.models.checks import labels_of, require_batch, require_grads
from ctr_model.models.model import EmbeddingTable, StepResult, Workspace
from ctr_model.parameters import FlatLayout, Floats, ModelInputError, Segment
from ctr_model.schema import Schema


class ClickModel(ABC):
    """A `Model` without `forward` and `backward`.

    `products` makes the matrix products of its layers, for `buffers` to pass on.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        tables: Sequence[EmbeddingTable],
        segments: Sequence[Segment],
        loss: Loss = SIGMOID,
    ) -> None:
        """Takes the columns of a batch, embedding tables, dense parameters, and the loss."""
        self.tables = tuple(tables)
        self.segments = tuple(segments)
        self._schema = schema
        self._layout = FlatLayout(segments)
        self._loss = loss
        self.num_params = self._layout.length
        self.products: NewProduct = float32_product

    def with_products(self, products: NewProduct) -> Self:
        """Returns the same model with other matrix products; workspaces belong to one of the two."""
        other = copy.copy(self)
        other.products = products
        return other

    @property
    def has_log_loss(self) -> bool:
        """Whether the loss is the log loss of clicks; a model may have another one."""
        return self._loss in (SIGMOID, SOFTMAX)

    @abstractmethod
    def forward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        buffers: Any,
        logits: Floats,
    ) -> None:
        """Overwrites the logits.

        Args:
            tensors: The dense parameters, one per segment.
            batch: Labels are ignored.
            lookups: By table.
            buffers: Result of `buffers` for this batch size or a larger one.
            logits: float32[B], or float32[B, *loss.shape].
        """

    @abstractmethod
    def backward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        buffers: Any,
        logit_grad: Floats,
        tensor_grads: Sequence[Floats],
        sparse_grads: Mapping[str, Floats],
    ) -> None:
        """Overwrites all gradients, given that of the logits; called after `forward`.

        Args:
            tensors: As for `forward`.
            batch: As for `forward`.
            lookups: As for `forward`.
            buffers: As `forward` left them.
            logit_grad: Shaped like the logits; may be overwritten.
            tensor_grads: One per segment.
            sparse_grads: By table float32[N, D].
        """

    def buffers(self, max_batch_size: int) -> Any:
        """Returns one thread's buffers for `forward` and `backward`; by default None."""
        return None

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._loss.shape, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = self._own(workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        logits, probabilities = own.logits[: batch.size], own.probabilities[: batch.size]
        self.forward(self._layout.views(params), batch, lookups, own.buffers, logits)
        self._loss.probabilities(logits, probabilities)
        return probabilities

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        """Computes the gradients of the loss summed over the examples; see `Model`."""
        own = self._own(workspace)
        labels = labels_of(batch)
        require_batch(self._schema, self.tables, batch, lookups, own)
        require_grads(lookups, sparse_grads)
        tensors, tensor_grads = self._layout.views(params), self._layout.views(dense_grad)

        logits, logit_grad = own.logits[: batch.size], own.logit_grad[: batch.size]
        probabilities = own.probabilities[: batch.size]
        self.forward(tensors, batch, lookups, own.buffers, logits)
        loss = self._loss.with_gradient(logits, labels, probabilities, logit_grad)
        self.backward(tensors, batch, lookups, own.buffers, logit_grad, tensor_grads, sparse_grads)
        return StepResult(loss, probabilities)

    def _own(self, workspace: Workspace) -> "_Workspace":
        if not isinstance(workspace, _Workspace) or workspace.model is not self:
            raise ModelInputError(
                "the workspace belongs to another model: use this model's workspace()"
            )
        return workspace


class _Workspace:
    """Buffers of one thread: those of every model, and the model's own."""

    def __init__(self, model: ClickModel, shape: tuple[int, ...], max_batch_size: int) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.buffers = model.buffers(max_batch_size)
        self.logits = np.empty((max_batch_size, *shape), np.float32)
        self.logit_grad = np.empty_like(self.logits)
        self.probabilities = np.empty(max_batch_size, np.float32)
