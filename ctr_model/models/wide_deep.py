"""Wide & deep: logistic regression plus a multilayer perceptron.

    wide = bias + sum over numbers of weight * number + sum over keys and crosses of w_key    [B]
    X    = [ dense | pooled embedding of slot 1 | ... | of slot S ]           [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(wide + An w + b)                                                  [B]

The wide part has weights for the keys of all slots and of crosses, in a table of dim 1 that FTRL keeps
sparse; the deep part has embeddings in a table of its own. Both are trained jointly.

Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016. As there, the wide part covers
categorical features and crosses; in PaddlePaddle's examples it only covers the numbers.
"""

from collections.abc import Mapping, Sequence

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.first_order import (
    first_order,
    first_order_backward,
    first_order_segments,
)
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema

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
        """Builds the network; other options and errors are those of `CtrDnn`, for the deep part.

        `crosses` are pairs of slots, by name, with weights in the wide part.
        """
        require_widths(dim=dim, hidden=hidden)
        require_range(init_range=init_range)
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
