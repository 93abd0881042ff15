"""DCN-v2: cross layers, which multiply inputs, below or beside a multilayer perceptron.

    X0     = [ dense | sum-pooled embedding of slot 1 | ... | of slot S ]     [B, n = num_dense + S * D]
    X(l+1) = X0 * (Xl Wl + bl) + Xl     for l = 0, ..., L - 1                 [B, n]
    M(X)   = relu(... relu(X U1 + c1) ... Un + cn) u + c                      [B], the perceptron

    stacked    sigmoid(M(XL))
    parallel   sigmoid(XL w + M(X0))

XL w + M(X0) is the layer on [ XL | An ] of the paper, An the perceptron's last hidden layer. W is [n, n], or
of low rank.

Wang, Shivanna, Cheng, Jain, Lin, Hong and Chi, "DCN V2: improved deep & cross network and practical lessons
for web-scale learning to rank systems", WWW 2021.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.cross import Cross
from ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_model.layers.linear import outer
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
from ctr_model.parameters import FlatLayout, Floats, Segment
from ctr_model.schema import Schema

EMBEDDING = "embedding"


@keeps_origin
class DcnV2:
    """The model of the module's docstring."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        structure: Literal["stacked", "parallel"] = "stacked",
        num_cross_layers: int = 2,
        cross_rank: int | None = None,
        init_range: float = 0.01,
    ) -> None:
        """Builds the network for the columns of a schema.

        Args:
            schema: The columns of a batch.
            dim: D, width of the embeddings.
            hidden: Widths of the perceptron's hidden layers.
            structure: Whether the perceptron sees XL or X0.
            num_cross_layers: L.
            cross_rank: Of the cross layers' W; None: full.
            init_range: Embeddings start uniform in [-init_range, init_range).

        Raises:
            ValueError: If a width or number of layers is smaller than 1, or the range negative.
        """
        require_widths(dim=dim, hidden=hidden, num_cross_layers=num_cross_layers)
        require_range(init_range=init_range)
        if cross_rank is not None:
            require_widths(cross_rank=cross_rank)
        self._schema = schema
        self._is_stacked = structure == "stacked"
        self._num_dense = len(schema.dense)
        self._width = self._num_dense + len(schema.slots) * dim
        self._cross = Cross(self._width, num_cross_layers, rank=cross_rank)
        self._mlp = Mlp((self._width, *hidden, 1))
        self.tables = (EmbeddingTable(name=EMBEDDING, dim=dim, init_range=init_range),)
        self.segments = (*self._cross.segments, *self._mlp.segments)
        if not self._is_stacked:
            head = Segment(name="head.weight", shape=(self._width,), init_std=self._width**-0.5)
            self.segments += (head,)
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> "_Workspace":
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return _Workspace(self, self._cross, self._mlp, self._width, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        own = own_workspace(self, workspace, _Workspace)
        require_batch(self._schema, self.tables, batch, lookups, own)
        tensors = self._layout.views(params)
        logits = self._forward(tensors, batch, lookups[EMBEDDING], own)
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

        lookup, probabilities = lookups[EMBEDDING], own.probabilities[: batch.size]
        logit_grad = own.layers.grads(batch.size)[-1].reshape(-1)  # [B]
        logits = self._forward(tensors, batch, lookup, own)
        loss = binary_cross_entropy(logits, labels, probabilities, logit_grad)
        scatter_slots(
            self._backward(tensors, batch.size, own, tensor_grads),
            lookup.inverse,
            lookup.offsets,
            lookup.num_slots,
            self._num_dense,
            sparse_grads[EMBEDDING],
        )
        return StepResult(loss, probabilities)

    def _forward(
        self, tensors: Sequence[Floats], batch: Batch, lookup: Lookup, own: "_Workspace"
    ) -> Floats:
        """Returns the logits float32[B]."""
        of_cross, of_mlp, of_head = self._parts(tensors)
        crossed = self._crossed(own, batch.size)
        x0 = crossed[0]
        x0[:, : self._num_dense] = batch.dense
        pool_slots(
            lookup.rows, lookup.inverse, lookup.offsets, lookup.num_slots, self._num_dense, x0
        )
        last = self._cross.forward(of_cross, crossed, own.cross)  # [B, n]
        logits = self._mlp.forward(of_mlp, own.layers.outputs(batch.size)).reshape(-1)
        if not self._is_stacked:
            head_logits = np.matmul(last, of_head[0], out=own.head_logits[: batch.size])
            np.add(logits, head_logits, out=logits)
        return logits

    def _backward(
        self,
        tensors: Sequence[Floats],
        size: int,
        own: "_Workspace",
        tensor_grads: Sequence[Floats],
    ) -> Floats:
        """Fills the gradients of all tensors from that of the logits, the MLP's last; returns that of X0."""
        of_cross, of_mlp, of_head = self._parts(tensors)
        cross_grads, mlp_grads, head_grads = self._parts(tensor_grads)
        outputs, grads = own.layers.outputs(size), own.layers.grads(size)
        crossed = self._crossed(own, size)
        input_grad = self._mlp.backward(of_mlp, outputs, grads, mlp_grads)  # [B, n]
        if self._is_stacked:
            self._cross.backward(of_cross, crossed, own.cross, input_grad, cross_grads)
            return input_grad
        cross_grad = own.cross_grad[:size]  # [B, n]
        logit_grad = grads[-1].reshape(-1)  # [B]
        np.matmul(crossed[-1].T, logit_grad, out=head_grads[0])
        outer(logit_grad, of_head[0], cross_grad)
        self._cross.backward(of_cross, crossed, own.cross, cross_grad, cross_grads)
        return np.add(input_grad, cross_grad, out=input_grad)

    def _parts(self, tensors: Sequence[Floats]) -> tuple[Sequence[Floats], ...]:
        """Returns the tensors of the cross layers, of the perceptron and of the head."""
        mlp = len(self._cross.segments)
        head = mlp + len(self._mlp.segments)
        return tensors[:mlp], tensors[mlp:head], tensors[head:]

    def _crossed(self, own: "_Workspace", size: int) -> list[Floats]:
        """Returns X0, ..., XL; the perceptron's input is the last if stacked, else the first."""
        mlp_input, crossed = own.layers.outputs(size)[0], own.cross.outputs(size)
        return [*crossed, mlp_input] if self._is_stacked else [mlp_input, *crossed]


class _Workspace(OwnWorkspace):
    """The buffers of one thread's steps."""

    def __init__(
        self, model: DcnV2, cross: Cross, mlp: Mlp, width: int, max_batch_size: int
    ) -> None:
        super().__init__(model, max_batch_size)
        self.cross = cross.buffers(max_batch_size)
        self.layers = mlp.buffers(max_batch_size)
        self.cross_grad = np.empty((max_batch_size, width), np.float32)
        self.head_logits = np.empty(max_batch_size, np.float32)
        self.probabilities = np.empty(max_batch_size, np.float32)
