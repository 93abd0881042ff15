"""DeepFM: a factorization machine and a multilayer perceptron over the same embeddings.

    fm   = bias + sum of weighted numbers + sum of w_i + sum over pairs i < j of <v_i, v_j>   [B]
    X    = [ dense | sum-pooled v of slot 1 | ... | of slot S ]               [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(fm + An w + b)                                                    [B]

The features i are an example's keys, each occurrence of value 1, with weights w_i in a table of dim 1 and
embeddings v_i in one of dim D, which both parts learn.

Guo, Tang, Ye, Li and He, "DeepFM: a factorization-machine based neural network for CTR prediction",
IJCAI 2017.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_model.layers.first_order import first_order, first_order_backward, first_order_segments
from ctr_model.layers.interactions import add_interactions, interactions_backward
from ctr_model.layers.mlp import Mlp
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
class DeepFm:
    """The model of the module's docstring."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
    ) -> None:
        """Builds the network for the columns of a schema.

        Args:
            schema: The columns of a batch.
            dim: D, width of the embeddings.
            hidden: Widths of the hidden layers.
            init_range: Embeddings start uniform in [-init_range, init_range), weights of keys at zero.

        Raises:
            ValueError: If a width is smaller than 1, or the range negative.
        """
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
        self._schema = schema
        self._dim = dim
        self._num_dense = len(schema.dense)
        self._mlp = Mlp((self._num_dense + len(schema.slots) * dim, *hidden, 1))
        self.tables = (
            EmbeddingTable(name=LINEAR, dim=1),
            EmbeddingTable(name=EMBEDDING, dim=dim, init_range=init_range),
        )
        self.segments = (*first_order_segments(self._num_dense), *self._mlp.segments)
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._mlp, self._dim, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = own_workspace(self, workspace, _Workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        logits = self._forward(self._layout.views(params), batch, lookups, own)
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
        tensors, tensor_grads = self._layout.views(params), self._layout.views(dense_grad)

        grads = own.layers.grads(batch.size)
        probabilities, logit_grad = own.probabilities[: batch.size], grads[-1].reshape(-1)
        logits = self._forward(tensors, batch, lookups, own)
        loss = binary_cross_entropy(logits, labels, probabilities, logit_grad)
        self._backward(tensors, batch, lookups, own, tensor_grads, sparse_grads)
        return StepResult(loss, probabilities)

    def _forward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        own: "_Workspace",
    ) -> Floats:
        """Returns the logits float32[B]."""
        weight, bias, *mlp_tensors = tensors
        linear, embedding = lookups[LINEAR], lookups[EMBEDDING]
        occurrences = embedding.inverse, embedding.offsets, embedding.num_slots
        logits, outputs = own.logits[: batch.size], own.layers.outputs(batch.size)
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
        add_interactions(embedding.rows, *occurrences, own.sums[: batch.size], logits)
        outputs[0][:, : self._num_dense] = batch.dense
        pool_slots(embedding.rows, *occurrences, self._num_dense, outputs[0])
        deep = self._mlp.forward(mlp_tensors, outputs)  # [B, 1]
        return np.add(logits, deep.reshape(-1), out=logits)

    def _backward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        own: "_Workspace",
        tensor_grads: Sequence[Floats],
        sparse_grads: Mapping[str, Floats],
    ) -> None:
        """Fills all gradients from that of the logits, which is the MLP's last."""
        weight_grad, bias_grad, *mlp_grads = tensor_grads
        linear, embedding = lookups[LINEAR], lookups[EMBEDDING]
        occurrences = embedding.inverse, embedding.offsets, embedding.num_slots
        outputs, grads = own.layers.outputs(batch.size), own.layers.grads(batch.size)
        logit_grad = grads[-1].reshape(-1)  # [B]
        first_order_backward(
            logit_grad,
            batch.dense,
            linear.inverse,
            linear.offsets,
            linear.num_slots,
            sparse_grads[LINEAR],
            weight_grad,
            bias_grad,
        )
        input_grad = self._mlp.backward(tensors[2:], outputs, grads, mlp_grads)
        scatter_slots(input_grad, *occurrences, self._num_dense, sparse_grads[EMBEDDING])
        interactions_backward(
            logit_grad,
            own.sums[: batch.size],
            embedding.rows,
            *occurrences,
            sparse_grads[EMBEDDING],
        )


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(self, model: DeepFm, mlp: Mlp, dim: int, max_batch_size: int) -> None:
        super().__init__(model, max_batch_size)
        self.layers = mlp.buffers(max_batch_size)
        self.sums = np.empty((max_batch_size, dim), np.float32)
        self.logits = np.empty(max_batch_size, np.float32)
        self.probabilities = np.empty(max_batch_size, np.float32)
