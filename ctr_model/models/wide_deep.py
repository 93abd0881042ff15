"""Logistic regression, alone (LR) and beside a multilayer perceptron (wide & deep).

    wide = bias + sum over numbers of weight * number + sum over keys and crosses of w_key    [B]
    sigmoid(wide)                                                                             LR

    X    = [ dense | pooled embedding of slot 1 | ... | of slot S ]           [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(wide + An w + b)                                                  wide & deep

The weights of keys are rows of a table of dim 1; a key that occurs twice in an example counts twice. Only
wide & deep has crosses, and keeps that table sparse by FTRL; its deep part has embeddings in a table of its
own. Both parts are trained jointly.

Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016. As there, the wide part covers
categorical features and crosses; in PaddlePaddle's examples it only covers the numbers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable, keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Lookup, Lookups, Segment, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema

LINEAR = "linear"


@keeps_origin
class LogisticRegression(ClickModel):
    """Logistic regression."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"), "it has one weight for each key, and adds the weights of all keys"
    )

    def __init__(self, schema: Schema) -> None:
        weight, bias = first_order_segments(schema.num_dense)
        super().__init__(
            schema,
            tables=[EmbeddingTable(name=LINEAR, dim=1, learning_rate=0.1)],
            segments=[weight, bias],
            biases=[bias],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: None, logits: Floats
    ) -> None:
        weight, bias = tensors
        first_order(batch.dense, lookups[LINEAR], weight, bias, logits)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: None,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        weight_grad, bias_grad = tensor_grads
        first_order_backward(
            logit_grad, batch.dense, lookups[LINEAR], sparse_grads[LINEAR], weight_grad, bias_grad
        )


WIDE, DEEP = "wide", "embedding"

# Gradients are means over a batch, so this `beta` corresponds to 1 in the formula with sums for batches of
# about 30 examples; larger batches need smaller `beta` and `l1`.
_WIDE_OPTIMIZER: Mapping[str, str | float] = {
    "name": "ftrl",
    "learning_rate": 0.1,
    "beta": 0.03,
    "l1": 0.01,
}


@keeps_origin
class WideDeep(ClickModel):
    """Wide & deep."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        crosses: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Builds the network; `crosses` are pairs of slots in the wide part, other options as in `CtrDnn`."""
        require_widths(hidden=hidden)
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots, table=DEEP
        )
        self._mlp = Mlp((self._input.width, *hidden, 1))
        pairs = tuple(
            (schema.slot_index(a, where="crosses"), schema.slot_index(b, where="crosses"))
            for a, b in crosses
        )
        weight, bias = first_order_segments(schema.num_dense, name=WIDE)
        super().__init__(
            schema,
            tables=[
                EmbeddingTable(name=WIDE, dim=1, crosses=pairs, optimizer=_WIDE_OPTIMIZER),
                *self._input.tables,
            ],
            segments=[weight, bias, *self._mlp.segments],
            biases=[bias],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: MlpBuffers, logits: Floats
    ) -> None:
        weight, bias, *of_mlp = tensors
        first_order(batch.dense, lookups[WIDE], weight, bias, logits)
        self._input.forward(batch.dense, lookups, buffers.input(batch.size))
        logits += self._mlp.forward(of_mlp, buffers, batch.size).reshape(-1)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: MlpBuffers,
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        weight_grad, bias_grad, *mlp_grads = tensor_grads
        first_order_backward(
            logit_grad, batch.dense, lookups[WIDE], sparse_grads[WIDE], weight_grad, bias_grad
        )
        input_grad = self._mlp.backward(tensors[2:], buffers, logit_grad.reshape(-1, 1), mlp_grads)
        self._input.backward(input_grad, lookups, sparse_grads)

    def buffers(self, max_batch_size: int) -> MlpBuffers:
        return self._mlp.buffers(max_batch_size, self.products, self.dropout)


def first_order_segments(num_dense: int, *, name: str = "linear") -> tuple[Segment, Segment]:
    """Returns the dense parameters, initially zeros: `weight` of the numbers, and `bias`."""
    return (
        Segment(name=f"{name}.weight", shape=(num_dense,), init_std=0.0),
        Segment(name=f"{name}.bias", shape=(1,), init_std=0.0),
    )


@kernel
def first_order(dense: Floats, lookup: Lookup, weight: Floats, bias: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B] with the first-order part; `lookup` is of a table of dim 1."""
    for b in range(out.size):
        z = bias[0]
        for j in range(weight.size):
            z += weight[j] * dense[b, j]
        first = b * lookup.num_slots
        for i in range(lookup.offsets[first], lookup.offsets[first + lookup.num_slots]):
            z += lookup.rows[np.uintp(lookup.inverse[i]), 0]
        out[b] = z


@kernel
def first_order_backward(
    grad: Floats,
    dense: Floats,
    lookup: Lookup,
    rows_grad: Floats,
    weight_grad: Floats,
    bias_grad: Floats,
) -> None:
    """Overwrites the gradients of rows float32[N, 1], weight and bias; `grad` is float32[B]."""
    rows_grad[:] = np.float32(0.0)
    weight_grad[:] = np.float32(0.0)
    bias_grad[0] = np.float32(0.0)
    for b in range(grad.size):
        bias_grad[0] += grad[b]
        for j in range(weight_grad.size):
            weight_grad[j] += grad[b] * dense[b, j]
        first = b * lookup.num_slots
        for i in range(lookup.offsets[first], lookup.offsets[first + lookup.num_slots]):
            rows_grad[np.uintp(lookup.inverse[i]), 0] += grad[b]
