"""LR: logistic regression.

    z = bias + sum over numbers of weight * number + sum over keys of w_key                   [B]
    sigmoid(z)

The weights of the keys of all slots are in a table of dim 1; a key that occurs twice in an example counts
twice.
"""

from collections.abc import Mapping, Sequence

from ctr_model.batch import Batch
from ctr_model.layers.first_order import first_order, first_order_backward, first_order_segments
from ctr_model.lookup import Lookup
from ctr_model.models.click_model import ClickModel
from ctr_model.models.model import EmbeddingTable
from ctr_model.models.origin import keeps_origin
from ctr_model.parameters import Floats
from ctr_model.schema import Schema

LINEAR = "linear"


@keeps_origin
class LogisticRegression(ClickModel):
    """Logistic regression."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"), "it has one weight for each key, and adds those of all keys"
    )

    def __init__(self, schema: Schema) -> None:
        """Builds the model for the columns of a schema; initial weights are zero."""
        weight, bias = first_order_segments(schema.num_dense)
        super().__init__(
            schema,
            tables=[EmbeddingTable(name=LINEAR, dim=1, learning_rate=0.1)],
            segments=[weight, bias],
            biases=[bias],
        )

    def forward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        buffers: None,
        logits: Floats,
    ) -> None:
        """Overwrites `logits` float32[B]."""
        weight, bias = tensors
        first_order(batch.dense, lookups[LINEAR], weight, bias, logits)

    def backward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        buffers: None,
        logit_grad: Floats,
        tensor_grads: Sequence[Floats],
        sparse_grads: Mapping[str, Floats],
    ) -> None:
        """Overwrites the gradients of all parameters and rows."""
        weight_grad, bias_grad = tensor_grads
        first_order_backward(
            logit_grad, batch.dense, lookups[LINEAR], sparse_grads[LINEAR], weight_grad, bias_grad
        )
