"""Factorization machines: FM, and DeepFM with a multilayer perceptron over the same embeddings.

    fm   = bias + sum of weighted numbers + sum of w_i + sum over pairs i < j of <v_i, v_j>   [B]
    sigmoid(fm)                                                                               FM

    X    = [ dense | pooled v of slot 1 | ... | of slot S ]                   [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(fm + An w + b)                                                                    DeepFM

The features i are an example's keys, each occurrence of value 1, with weights w_i in a table of dim 1 and
embeddings v_i in one of dim D. Numbers have weights, but no embeddings. Only X is pooled: pairs are of all
keys. They are summed as

    z[b] = sum over j of <v_j, v_1 + ... + v_(j-1)>
    dz[b] / dv_i = (v_1 + ... + v_n) - v_i

which takes one pass over the n features instead of their pairs, like Rendle's 1/2 (|sum of v|^2 - sum of
|v|^2), but without cancellation of large numbers.

Rendle, "Factorization machines", ICDM 2010. Guo, Tang, Ye, Li and He, "DeepFM: a factorization-machine based
neural network for CTR prediction", IJCAI 2017.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import (
    PooledSlots,
    Pooling,
    SlotOptions,
    require_range,
    require_widths,
)
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable, keeps_origin
from ctr_ps.ctr_model.models.wide_deep import (
    first_order,
    first_order_backward,
    first_order_segments,
)
from ctr_ps.ctr_model.parameters import Floats, Lookup, Lookups, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema

LINEAR, EMBEDDING = "linear", "embedding"

_Buffers = tuple[MlpBuffers, Floats]
"""Of the perceptron, and float32[B, D] for the sums of the examples' embeddings."""


@keeps_origin
class Fm(ClickModel):
    """A factorization machine."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"),
        "it multiplies the embeddings of all pairs of keys, so nothing is pooled and all slots have one dim",
    )

    def __init__(self, schema: Schema, *, dim: int = 10, init_range: float = 0.01) -> None:
        """Builds the model; raises ValueError if the width is less than 1, or the range negative."""
        require_widths(dim=dim)
        require_range(init_range)
        self._dim = dim
        weight, bias = first_order_segments(schema.num_dense)
        super().__init__(
            schema,
            tables=[
                EmbeddingTable(name=LINEAR, dim=1),
                EmbeddingTable(name=EMBEDDING, dim=dim, init_range=init_range),
            ],
            segments=[weight, bias],
            biases=[bias],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: Floats, logits: Floats
    ) -> None:
        weight, bias = tensors
        first_order(batch.dense, lookups[LINEAR], weight, bias, logits)
        add_interactions(lookups[EMBEDDING], buffers[: batch.size], logits)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: Floats,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        weight_grad, bias_grad = tensor_grads
        sums, embedding_grad = buffers[: batch.size], sparse_grads[EMBEDDING]
        first_order_backward(
            logit_grad, batch.dense, lookups[LINEAR], sparse_grads[LINEAR], weight_grad, bias_grad
        )
        embedding_grad.fill(0.0)
        interactions_backward(logit_grad, sums, lookups[EMBEDDING], embedding_grad)

    def buffers(self, max_batch_size: int) -> Floats:
        """Returns float32[B, D] for the sums of examples' embeddings."""
        return np.empty((max_batch_size, self._dim), np.float32)


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
        require_widths(hidden=hidden)
        self._dim = dim
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots, table=EMBEDDING
        )
        for name, options in slots.items():
            if options.get("dim", dim) != dim:
                raise ValueError(
                    f"slots.{name}.dim is {options['dim']}, but the factorization machine multiplies the "
                    f"embeddings of all slots, so all must have dim = {dim}"
                )
        self._mlp = Mlp((self._input.width, *hidden, 1))
        weight, bias = first_order_segments(schema.num_dense)
        super().__init__(
            schema,
            tables=[EmbeddingTable(name=LINEAR, dim=1), *self._input.tables],
            segments=[weight, bias, *self._mlp.segments],
            biases=[bias],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: _Buffers, logits: Floats
    ) -> None:
        weight, bias, *of_mlp = tensors
        of_layers, sums = buffers
        first_order(batch.dense, lookups[LINEAR], weight, bias, logits)
        add_interactions(lookups[EMBEDDING], sums[: batch.size], logits)
        self._input.forward(batch.dense, lookups, of_layers.input(batch.size))
        logits += self._mlp.forward(of_mlp, of_layers, batch.size).reshape(-1)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: _Buffers,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        weight_grad, bias_grad, *mlp_grads = tensor_grads
        of_layers, sums = buffers
        first_order_backward(
            logit_grad, batch.dense, lookups[LINEAR], sparse_grads[LINEAR], weight_grad, bias_grad
        )
        input_grad = self._mlp.backward(
            tensors[2:], of_layers, logit_grad.reshape(-1, 1), mlp_grads
        )
        self._input.backward(input_grad, lookups, sparse_grads)
        embedding, out = lookups[EMBEDDING], sparse_grads[EMBEDDING]
        interactions_backward(logit_grad, sums[: batch.size], embedding, out)

    def buffers(self, max_batch_size: int) -> _Buffers:
        sums = np.empty((max_batch_size, self._dim), np.float32)
        return self._mlp.buffers(max_batch_size, self.products, self.dropout), sums


@kernel
def add_interactions(lookup: Lookup, sums: Floats, out: Floats) -> None:
    """Adds z to `out` float32[B]; overwrites `sums` float32[B, D], the sums of v, for the backward pass."""
    rows, dim = lookup.rows, np.uintp(lookup.rows.shape[1])
    for b in range(out.size):
        z = np.float32(0.0)
        sums[b] = np.float32(0.0)
        first = b * lookup.num_slots
        for i in range(lookup.offsets[first], lookup.offsets[first + lookup.num_slots]):
            row = np.uintp(lookup.inverse[i])
            for d in range(dim):
                z += rows[row, d] * sums[b, d]
                sums[b, d] += rows[row, d]
        out[b] += z


@kernel
def interactions_backward(grad: Floats, sums: Floats, lookup: Lookup, out: Floats) -> None:
    """Adds the gradient of the rows to `out` float32[N, D]; `sums` is that of `add_interactions`."""
    rows, dim = lookup.rows, np.uintp(lookup.rows.shape[1])
    for b in range(grad.size):
        first = b * lookup.num_slots
        for i in range(lookup.offsets[first], lookup.offsets[first + lookup.num_slots]):
            row = np.uintp(lookup.inverse[i])
            for d in range(dim):
                out[row, d] += grad[b] * (sums[b, d] - rows[row, d])
