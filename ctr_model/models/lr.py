"""LR: logistic regression.

    z = bias + sum over numbers of weight * number + sum over keys of w_key                   [B]
    sigmoid(z)

The keys of all slots have their weights in a table of dim 1; a key that stands in an example twice counts
twice.
"""

from collections.abc import Mapping

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.first_order import first_order, first_order_backward, first_order_segments
from ctr_model.losses import binary_cross_entropy, sigmoid_probabilities
from ctr_model.models.checks import (
    OwnWorkspace,
    labels_of,
    own_workspace,
    require_batch,
    require_grads,
)
from ctr_model.models.model import EmbeddingTable, Lookup, StepResult, Workspace
from ctr_model.models.origin import keeps_origin
from ctr_model.parameters import FlatLayout, Floats
from ctr_model.schema import Schema

LINEAR = "linear"


@keeps_origin
class LogisticRegression:
    """The model of the module's docstring."""

    def __init__(self, schema: Schema) -> None:
        """Takes the columns of a batch; all weights start at zero."""
        self._schema = schema
        self.tables = (EmbeddingTable(name=LINEAR, dim=1),)
        self.segments = first_order_segments(len(schema.dense))
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = own_workspace(self, workspace, _Workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        logits, probabilities = own.logits[: batch.size], own.probabilities[: batch.size]
        self._forward(params, batch, lookups[LINEAR], logits)
        sigmoid_probabilities(logits, probabilities)
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
        own = own_workspace(self, workspace, _Workspace)
        labels = labels_of(batch)
        require_batch(self._schema, self.tables, batch, lookups, own)
        require_grads(lookups, sparse_grads)
        weight_grad, bias_grad = self._layout.views(dense_grad)

        lookup = lookups[LINEAR]
        logits, probabilities = own.logits[: batch.size], own.probabilities[: batch.size]
        logit_grad = own.logit_grad[: batch.size]
        self._forward(params, batch, lookup, logits)
        loss = binary_cross_entropy(logits, labels, probabilities, logit_grad)
        first_order_backward(
            logit_grad,
            batch.dense,
            lookup.inverse,
            lookup.offsets,
            lookup.num_slots,
            sparse_grads[LINEAR],
            weight_grad,
            bias_grad,
        )
        return StepResult(loss, probabilities)

    def _forward(self, params: Floats, batch: Batch, lookup: Lookup, logits: Floats) -> None:
        weight, bias = self._layout.views(params)
        first_order(
            batch.dense,
            lookup.rows,
            lookup.inverse,
            lookup.offsets,
            lookup.num_slots,
            weight,
            bias,
            logits,
        )


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(self, model: LogisticRegression, max_batch_size: int) -> None:
        super().__init__(model, max_batch_size)
        self.logits = np.empty(max_batch_size, np.float32)
        self.logit_grad = np.empty(max_batch_size, np.float32)
        self.probabilities = np.empty(max_batch_size, np.float32)
