"""FM: a factorization machine.

    z = bias + sum of weighted numbers + sum of w_i + sum over pairs i < j of <v_i, v_j>      [B]
    sigmoid(z)

The features i are an example's keys, each occurrence of value 1, with weights w_i in a table of dim 1 and
embeddings v_i in one of dim D. Numbers have weights, but no embeddings.

Rendle, "Factorization machines", ICDM 2010.
"""

from collections.abc import Mapping

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.first_order import first_order, first_order_backward, first_order_segments
from ctr_model.layers.interactions import add_interactions, interactions_backward
from ctr_model.losses import binary_cross_entropy, sigmoid_probabilities
from ctr_model.models.checks import (
    OwnWorkspace,
    labels_of,
    own_workspace,
    require_batch,
    require_grads,
    require_range,
    require_widths,
)
from ctr_model.models.model import EmbeddingTable, Lookup, StepResult, Workspace
from ctr_model.models.origin import keeps_origin
from ctr_model.parameters import FlatLayout, Floats
from ctr_model.schema import Schema

LINEAR, EMBEDDING = "linear", "embedding"


@keeps_origin
class Fm:
    """The model of the module's docstring."""

    def __init__(self, schema: Schema, *, dim: int = 10, init_range: float = 0.01) -> None:
        """Builds the machine for the columns of a schema.

        Args:
            schema: The columns of a batch.
            dim: D, width of the embeddings.
            init_range: Embeddings start uniform in [-init_range, init_range), weights at zero.

        Raises:
            ValueError: If the width is smaller than 1, or the range negative.
        """
        require_widths(dim=dim)
        require_range(init_range=init_range)
        self._schema = schema
        self._dim = dim
        self.tables = (
            EmbeddingTable(name=LINEAR, dim=1),
            EmbeddingTable(name=EMBEDDING, dim=dim, init_range=init_range),
        )
        self.segments = first_order_segments(len(schema.dense))
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._dim, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = own_workspace(self, workspace, _Workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        logits = self._forward(params, batch, lookups, own)
        probabilities = own.probabilities[: batch.size]
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

        linear, embedding = lookups[LINEAR], lookups[EMBEDDING]
        probabilities, grad = own.probabilities[: batch.size], own.logit_grad[: batch.size]
        logits = self._forward(params, batch, lookups, own)
        loss = binary_cross_entropy(logits, labels, probabilities, grad)
        first_order_backward(
            grad,
            batch.dense,
            linear.inverse,
            linear.offsets,
            linear.num_slots,
            sparse_grads[LINEAR],
            weight_grad,
            bias_grad,
        )
        sparse_grads[EMBEDDING].fill(0.0)
        interactions_backward(
            grad,
            own.sums[: batch.size],
            embedding.rows,
            embedding.inverse,
            embedding.offsets,
            embedding.num_slots,
            sparse_grads[EMBEDDING],
        )
        return StepResult(loss, probabilities)

    def _forward(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], own: "_Workspace"
    ) -> Floats:
        """Returns the logits float32[B]."""
        weight, bias = self._layout.views(params)
        linear, embedding = lookups[LINEAR], lookups[EMBEDDING]
        logits = own.logits[: batch.size]
        first_order(
            batch.dense,
            linear.rows,
            linear.inverse,
            linear.offsets,
            linear.num_slots,
            weight,
            bias,
            logits,
        )
        add_interactions(
            embedding.rows,
            embedding.inverse,
            embedding.offsets,
            embedding.num_slots,
            own.sums[: batch.size],
            logits,
        )
        return logits


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(self, model: Fm, dim: int, max_batch_size: int) -> None:
        super().__init__(model, max_batch_size)
        self.sums = np.empty((max_batch_size, dim), np.float32)
        self.logits = np.empty(max_batch_size, np.float32)
        self.logit_grad = np.empty(max_batch_size, np.float32)
        self.probabilities = np.empty(max_batch_size, np.float32)
