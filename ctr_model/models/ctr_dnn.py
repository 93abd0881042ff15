"""CTR-DNN: a multilayer perceptron over embeddings and numbers.

    X = [ dense | pooled embedding of slot 1 | ... | of slot S ]              [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   A2 = relu(A1 W2 + b2)   A3 = relu(A2 W3 + b3)      [B, H]
    softmax(A3 W4 + b4) over (no click, click)                                [B, 2]

The network of PaddlePaddle's CTR tutorial: D = 10, H = 400, initial weights normal with standard deviation
1/sqrt(fan-in), biases zero, cross entropy.
"""

from collections.abc import Mapping, Sequence

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.losses import SOFTMAX
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Lookups, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema

CLASSES = 2


@keeps_origin
class CtrDnn(ClickModel):
    """CTR-DNN."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        table: str = "embedding",
    ) -> None:
        """Builds the network; raises ValueError for an unknown slot or an option out of range.

        `dim` is D, the width of the embeddings, and `hidden` has the widths of the hidden layers. Initial
        embeddings are uniform in [-init_range, init_range). A slot's embeddings are pooled as `pooling` says,
        "sum", "mean" or "max"; `slots` overrides `dim` and `pooling` by slot name. `table` names the
        embedding table.
        """
        require_widths(hidden=hidden)
        self._input = PooledSlots(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots, table=table
        )
        self._mlp = Mlp((self._input.width, *hidden, CLASSES))
        super().__init__(
            schema,
            tables=self._input.tables,
            segments=self._mlp.segments,
            loss=SOFTMAX,
            biases=self._mlp.segments[-1:],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: MlpBuffers, logits: Floats
    ) -> None:
        self._input.forward(batch.dense, lookups, buffers.input(batch.size))
        logits[:] = self._mlp.forward(tensors, buffers, batch.size)

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
        input_grad = self._mlp.backward(tensors, buffers, logit_grad, tensor_grads)
        self._input.backward(input_grad, lookups, sparse_grads)

    def buffers(self, max_batch_size: int) -> MlpBuffers:
        return self._mlp.buffers(max_batch_size, self.products, self.dropout)
