"""Base class of the models: everything except their formulas.

    predict     checks -> forward -> probabilities of the logits
    gradient    checks -> forward -> loss, and its gradient by the logits -> backward

A model derives from `ClickModel`, declares its tables and segments in `__init__`, and implements `forward`
and `backward`.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.delayed_labels import (
    Delay,
    calibrated,
    fake_negative_weights,
    rates_of_rows,
)
from ctr_ps.ctr_model.layers.losses import SIGMOID, SOFTMAX, Loss
from ctr_ps.ctr_model.layers.mlp import Dropout
from ctr_ps.ctr_model.layers.products import NewProduct, float32_product
from ctr_ps.ctr_model.models.checks import (
    errors_with_shapes,
    is_own,
    labels_of,
    mark,
    require_batch,
    require_grads,
    require_tasks,
    require_written,
    weights_of,
)
from ctr_ps.ctr_model.models.model import StepResult, Workspace
from ctr_ps.ctr_model.parameters import (
    EmbeddingTable,
    FlatLayout,
    Floats,
    Lookups,
    ModelInputError,
    Segment,
    SparseGrads,
    Tensors,
)
from ctr_ps.ctr_model.schema import Schema


class ClickModel(ABC):
    """A `Model` without `forward` and `backward`; `buffers` passes `products` and `dropout` to the layers."""

    def __init__(
        self,
        schema: Schema,
        *,
        tables: Sequence[EmbeddingTable],
        segments: Sequence[Segment],
        loss: Loss = SIGMOID,
        biases: Sequence[Segment] = (),
    ) -> None:
        """Declares tables and dense parameters.

        `biases` has the segment that is the bias of the logit; see `initial_biases`. Raises ValueError for a
        schema of several labels.
        """
        require_tasks(type(self).__name__, schema, ())
        self.tables = tuple(tables)
        self.segments = tuple(segments)
        self._schema = schema
        self._layout = FlatLayout(segments)
        self._loss = loss
        self.num_params = self._layout.length
        self.products: NewProduct = float32_product
        self.dropout: Dropout | None = None
        self._logit_offset = 0.0
        self._delay: Delay = "none"
        self._biases = tuple(biases)

    def initial_biases(self, rates: Sequence[float]) -> dict[str, tuple[float, ...]]:
        """Returns the initial logit bias, by segment, with which the model predicts its rate, in (0, 1).

        A logit starts at log(rate / (1 - rate)), as in section 4.1 of Lin et al., "Focal loss for dense
        object detection", ICCV 2017: otherwise the rows of frequent keys would learn the overall rate.
        """
        return {
            bias.name: (0.0,) * (bias.shape[0] - 1) + (math.log(rate / (1.0 - rate)),)
            for bias, rate in zip(self._biases, rates, strict=False)
        }

    def with_products(self, products: NewProduct) -> Self:
        """Returns the same model with other matrix products; the two do not share workspaces."""
        other = copy.copy(self)
        other.products = products
        return other

    def with_dropout(self, rate: float, seed: int) -> Self:
        """Returns the same model with dropout in its gradients; ValueError without layers that have it."""
        other = copy.copy(self)
        other.dropout = Dropout(rate, seed)
        if not other.workspace(1).has_dropout:
            raise ValueError(
                f"{type(self).__name__} has no hidden layer that applies dropout: use Mlp, and pass "
                "self.dropout in buffers()"
            )
        return other

    def with_logit_offset(self, offset: float) -> Self:
        """Returns the same model with a loss of the click logits plus `offset`; predictions are without."""
        other = copy.copy(self)
        other._logit_offset = offset
        return other

    def with_delay(self, delay: Delay) -> Self:
        """Returns the same model with a correction for clicks that come later than their impressions."""
        other = copy.copy(self)
        other._delay = delay
        return other

    @property
    def has_log_loss(self) -> bool:
        """Whether the loss is the log loss of clicks."""
        return self._loss in (SIGMOID, SOFTMAX)

    @abstractmethod
    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: Any, logits: Floats
    ) -> None:
        """Overwrites the logits, float32[B] or float32[B, *loss.shape]."""

    @abstractmethod
    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: Any,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        """Overwrites the gradients of tensors and rows, after `forward`; `logit_grad` may be overwritten."""

    def buffers(self, max_batch_size: int) -> Any:
        """Returns one thread's buffers for `forward` and `backward`; by default None."""
        return None

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._loss.shape, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Lookups, workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = self._own(workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        logits, probabilities = own.logits[: batch.size], own.probabilities[: batch.size]
        tensors = self._layout.views(params)
        own.begin(trains=False)
        with errors_with_shapes(self, "forward", batch, lookups):
            self.forward(tensors, batch, lookups, own.buffers, logits)
        self._loss.probabilities(logits, probabilities)
        if self._delay == "fnc":
            probabilities[:] = calibrated(probabilities)
        return probabilities

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Lookups,
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: SparseGrads,
    ) -> StepResult:
        """Computes the gradients of the loss summed over the examples; see `Model`."""
        own = self._own(workspace)
        labels = labels_of(batch)
        require_batch(self._schema, self.tables, batch, lookups, own)
        require_grads(lookups, sparse_grads)
        # Neither list nor dict: an array that takes the place of one of ours would never be seen.
        tensors, tensor_grads = self._layout.views(params), tuple(self._layout.views(dense_grad))
        sparse_grads = MappingProxyType(sparse_grads)

        logits, logit_grad = own.logits[: batch.size], own.logit_grad[: batch.size]
        probabilities = own.probabilities[: batch.size]
        is_first = not own.is_checked and is_own(self)
        if is_first:
            mark([logits, dense_grad, *sparse_grads.values()])
        own.begin(trains=True)
        with errors_with_shapes(self, "forward", batch, lookups):
            self.forward(tensors, batch, lookups, own.buffers, logits)
        if is_first:
            require_written("forward", {"the logits": logits})
        weights, shown = weights_of(batch, own.weights), probabilities
        if self._delay == "fnw":  # by its own predictions, which are without the offset
            self._loss.probabilities(logits, probabilities)
            weights = weights * fake_negative_weights(labels, probabilities)
            shown = rates_of_rows(probabilities, math.exp(-self._logit_offset))
        if self._logit_offset:
            of_click = logits[:, -1] if self._loss.shape else logits
            of_click += np.float32(self._logit_offset)
        loss = self._loss.with_gradient(logits, labels, weights, probabilities, logit_grad)
        with errors_with_shapes(self, "backward", batch, lookups):
            self.backward(
                tensors, batch, lookups, own.buffers, logit_grad, tensor_grads, sparse_grads
            )
        if is_first:
            named = zip(self.segments, tensor_grads, strict=True)
            written = {f"the gradient of {segment.name}": grad for segment, grad in named}
            for name, grad in sparse_grads.items():
                written[f"the gradient of table {name!r}"] = grad
            require_written("backward", written)
            own.is_checked = True
        return StepResult(loss, shown)

    def _own(self, workspace: Workspace) -> "_Workspace":
        if not isinstance(workspace, _Workspace) or workspace.model is not self:
            raise ModelInputError(
                "the workspace belongs to another model: use this model's workspace()"
            )
        return workspace


class _Workspace:
    def __init__(self, model: ClickModel, shape: tuple[int, ...], max_batch_size: int) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.is_checked = False  # whether the user's own code was seen to fill all that it should
        self.batch_number = 0
        of_thread = model
        if model.dropout is not None:
            of_thread = copy.copy(model)
            of_thread.dropout = model.dropout.of_thread()
        self._dropout = of_thread.dropout
        self.buffers = of_thread.buffers(max_batch_size)
        self.logits = np.empty((max_batch_size, *shape), np.float32)
        self.logit_grad = np.empty_like(self.logits)
        self.probabilities = np.empty(max_batch_size, np.float32)
        self.weights = np.ones(max_batch_size, np.float32)

    @property
    def has_dropout(self) -> bool:
        return self._dropout is not None and self._dropout.num_layers > 0

    def begin(self, *, trains: bool) -> None:
        """Starts a forward pass: of training, with dropout, or of a prediction."""
        if self._dropout is not None:
            self._dropout.begin(self.batch_number if trains else None)
