"""CTR-DNN: embeddings and numbers through three wide layers.

    X = [ dense | sum-pooled embedding of slot 1 | ... | of slot S ]          [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   A2 = relu(A1 W2 + b2)   A3 = relu(A2 W3 + b3)      [B, H]
    softmax(A3 W4 + b4) over (no click, click)                                [B, 2]

The network of PaddlePaddle's CTR tutorial: D = 10, H = 400, weights normal with standard deviation
1/sqrt(fan-in), biases zero, cross entropy.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_model.layers.mlp import Mlp
from ctr_model.losses import click_probabilities, cross_entropy
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

CLASSES = 2


@keeps_origin
class CtrDnn:
    """The model of the module's docstring."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        table: str = "embedding",
    ) -> None:
        """Builds the network for the columns of a schema.

        Args:
            schema: The columns of a batch.
            dim: D, width of the embeddings.
            hidden: Widths of the hidden layers.
            init_range: Embeddings start uniform in [-init_range, init_range).
            table: Name of the table of embeddings.

        Raises:
            ValueError: If a width is smaller than 1, or the range negative.
        """
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
        self._schema = schema
        self._num_dense = len(schema.dense)
        self._mlp = Mlp((self._num_dense + len(schema.slots) * dim, *hidden, CLASSES))
        self._table = table
        self.tables = (EmbeddingTable(name=table, dim=dim, init_range=init_range),)
        self.segments = self._mlp.segments
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
        logits = self._forward(params, batch, lookups, own.layers.outputs(batch.size))
        probabilities = own.probabilities[: batch.size]
        click_probabilities(logits, probabilities)
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
        tensor_grads = self._layout.views(dense_grad)

        outputs, grads = own.layers.outputs(batch.size), own.layers.grads(batch.size)
        probabilities = own.probabilities[: batch.size]
        logits = self._forward(params, batch, lookups, outputs)
        loss = cross_entropy(logits, labels, probabilities, grads[-1])
        input_grad = self._mlp.backward(self._layout.views(params), outputs, grads, tensor_grads)
        lookup = lookups[self._table]
        scatter_slots(
            input_grad,
            lookup.inverse,
            lookup.offsets,
            lookup.num_slots,
            self._num_dense,
            sparse_grads[self._table],
        )
        return StepResult(loss, probabilities)

    def _forward(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], outputs: list[Floats]
    ) -> Floats:
        lookup, x = lookups[self._table], outputs[0]
        x[:, : self._num_dense] = batch.dense
        pool_slots(
            lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, self._num_dense, x
        )
        return self._mlp.forward(self._layout.views(params), outputs)


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(self, model: CtrDnn, mlp: Mlp, max_batch_size: int) -> None:
        super().__init__(model, max_batch_size)
        self.layers = mlp.buffers(max_batch_size)
        self.probabilities = np.empty(max_batch_size, np.float32)
