"""LR: logistic regression.

    z = bias + sum over numbers of weight * number + sum over keys of w_key                   [B]
    sigmoid(z)

The weights of the keys of all slots are in a table of dim 1; a key that occurs twice in an example counts
twice.
"""

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.first_order import (
    first_order,
    first_order_backward,
    first_order_segments,
)
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema

LINEAR = "linear"


@keeps_origin
class LogisticRegression(ClickModel):
    """Logistic regression."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"), "it has one weight for each key, and adds those of all keys"
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
