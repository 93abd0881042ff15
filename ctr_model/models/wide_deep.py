"""Wide & deep: logistic regression that remembers, next to a multilayer perceptron that generalises.

    wide = bias + sum over numbers of weight * number + sum over keys and crosses of w_key    [B]
    X    = [ dense | sum-pooled embedding of slot 1 | ... | of slot S ]       [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(wide + An w + b)                                                  [B]

The wide part has a weight for each key of every slot and for each pair of values of the slots that are
crossed, in a table of dim 1 that FTRL keeps sparse; the deep part has embeddings in a table of its own. Both
are trained together.

Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016. As there, the wide part covers
categories and crosses; in examples for PaddlePaddle it is linear in the numbers alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_model.layers.first_order import first_order, first_order_backward, first_order_segments
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

WIDE, DEEP = "wide", "embedding"

# Gradients are means over a batch, so `beta` stands for 1 of the formula with sums when a batch has some 30
# examples; larger batches want less of it, and of `l1`.
_WIDE_OPTIMIZER: Mapping[str, str | float] = {
    "name": "ftrl",
    "learning_rate": 0.1,
    "beta": 0.03,
    "l1": 0.01,
}


@keeps_origin
class WideDeep:
    """The model of the module's docstring."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        crosses: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Builds the network for the columns of a schema.

        Args:
            schema: The columns of a batch.
            dim: D, width of the embeddings.
            hidden: Widths of the hidden layers.
            init_range: Embeddings start uniform in [-init_range, init_range), weights of keys at zero.
            crosses: Pairs of slots, by name, whose values together have weights in the wide part.

        Raises:
            ValueError: If a width is smaller than 1, the range negative, or a slot unknown.
        """
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
        self._schema = schema
        self._num_dense = len(schema.dense)
        self._mlp = Mlp((self._num_dense + len(schema.slots) * dim, *hidden, 1))
        pairs = tuple((schema.slot_index(a), schema.slot_index(b)) for a, b in crosses)
        self.tables = (
            EmbeddingTable(name=WIDE, dim=1, crosses=pairs, optimizer=_WIDE_OPTIMIZER),
            EmbeddingTable(name=DEEP, dim=dim, init_range=init_range),
        )
        self.segments = (*first_order_segments(self._num_dense, name=WIDE), *self._mlp.segments)
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._mlp, max_batch_size)

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

        outputs, grads = own.layers.outputs(batch.size), own.layers.grads(batch.size)
        probabilities, logit_grad = own.probabilities[: batch.size], grads[-1].reshape(-1)  # [B]
        logits = self._forward(tensors, batch, lookups, own)
        loss = binary_cross_entropy(logits, labels, probabilities, logit_grad)
        wide, deep = lookups[WIDE], lookups[DEEP]
        first_order_backward(
            logit_grad,
            batch.dense,
            wide.inverse,
            wide.offsets,
            wide.num_slots,
            sparse_grads[WIDE],
            tensor_grads[0],
            tensor_grads[1],
        )
        input_grad = self._mlp.backward(tensors[2:], outputs, grads, tensor_grads[2:])
        scatter_slots(
            input_grad,
            deep.inverse,
            deep.offsets,
            deep.num_slots,
            self._num_dense,
            sparse_grads[DEEP],
        )
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
        wide, deep = lookups[WIDE], lookups[DEEP]
        logits, outputs = own.logits[: batch.size], own.layers.outputs(batch.size)
        first_order(
            batch.dense,
            wide.rows,
            wide.inverse,
            wide.offsets,
            wide.num_slots,
            weight,
            bias,
            logits,
        )
        x = outputs[0]  # [B, num_dense + S * D]
        x[:, : self._num_dense] = batch.dense
        pool_slots(deep.rows, deep.inverse, deep.offsets, deep.num_slots, self._num_dense, x)
        logits += self._mlp.forward(mlp_tensors, outputs).reshape(-1)
        return logits


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(self, model: WideDeep, mlp: Mlp, max_batch_size: int) -> None:
        super().__init__(model, max_batch_size)
        self.layers = mlp.buffers(max_batch_size)
        self.logits = np.empty(max_batch_size, np.float32)
        self.probabilities = np.empty(max_batch_size, np.float32)
