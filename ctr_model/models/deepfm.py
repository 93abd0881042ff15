"""DeepFM: a factorization machine and a multilayer perceptron over the same embeddings.

    fm   = bias + sum of weighted numbers + sum of w_i + sum over pairs i < j of <v_i, v_j>   [B]
    X    = [ dense | pooled v of slot 1 | ... | of slot S ]                   [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(fm + An w + b)                                                    [B]

The features i are an example's keys, each occurrence of value 1, with weights w_i in a table of dim 1 and
embeddings v_i in one of dim D, shared by both parts. Only X is pooled: pairs are of all keys.

Guo, Tang, Ye, Li and He, "DeepFM: a factorization-machine based neural network for CTR prediction",
IJCAI 2017.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.first_order import (
    first_order,
    first_order_backward,
    first_order_segments,
)
from ctr_ps.ctr_model.layers.interactions import add_interactions, interactions_backward
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema

LINEAR, EMBEDDING = "linear", "embedding"


@keeps_origin
class DeepFm(ClickModel):
    """DeepFM."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        """Builds the network; options and errors as for `CtrDnn`, but `slots` may set `pooling` only."""
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
        self._dim = dim
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots, table=EMBEDDING
        )
        _require_one_dim(dim, slots)
        self._mlp = Mlp((self._input.width, *hidden, 1))
        weight, bias = first_order_segments(schema.num_dense)
        super().__init__(
            schema,
            tables=[
                EmbeddingTable(name=LINEAR, dim=1),
                *self._input.tables,
            ],
            segments=[weight, bias, *self._mlp.segments],
            biases=[bias],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: "_Buffers", logits: Floats
    ) -> None:
        weight, bias, *of_mlp = tensors
        embedding, sums = lookups[EMBEDDING], buffers.sums[: batch.size]
        first_order(batch.dense, lookups[LINEAR], weight, bias, logits)
        add_interactions(embedding, sums, logits)
        self._input.forward(batch.dense, lookups, buffers.mlp.input(batch.size))
        logits += self._mlp.forward(of_mlp, buffers.mlp, batch.size).reshape(-1)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: "_Buffers",
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        weight_grad, bias_grad, *mlp_grads = tensor_grads
        embedding, sums = lookups[EMBEDDING], buffers.sums[: batch.size]
        first_order_backward(
            logit_grad, batch.dense, lookups[LINEAR], sparse_grads[LINEAR], weight_grad, bias_grad
        )
        input_grad = self._mlp.backward(
            tensors[2:], buffers.mlp, logit_grad.reshape(-1, 1), mlp_grads
        )
        self._input.backward(input_grad, lookups, sparse_grads)
        interactions_backward(logit_grad, sums, embedding, sparse_grads[EMBEDDING])

    def buffers(self, max_batch_size: int) -> "_Buffers":
        sums = np.empty((max_batch_size, self._dim), np.float32)
        return _Buffers(self._mlp.buffers(max_batch_size, self.products, self.dropout), sums)


def _require_one_dim(dim: int, slots: Mapping[str, SlotOptions]) -> None:
    for name, options in slots.items():
        if options.get("dim", dim) != dim:
            raise ValueError(
                f"slots.{name}.dim is {options['dim']}, but the factorization machine multiplies the "
                f"embeddings of all slots with each other, so all have dim = {dim}"
            )


@dataclass(frozen=True, slots=True)
class _Buffers:
    mlp: MlpBuffers
    sums: Floats  # [B, D], sums of the examples' embeddings
