"""FM: a factorization machine.

    z = bias + sum of weighted numbers + sum of w_i + sum over pairs i < j of <v_i, v_j>      [B]
    sigmoid(z)

The features i are an example's keys, each occurrence of value 1, with weights w_i in a table of dim 1 and
embeddings v_i in one of dim D. Numbers have weights, but no embeddings.

Rendle, "Factorization machines", ICDM 2010.
"""

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.first_order import (
    first_order,
    first_order_backward,
    first_order_segments,
)
from ctr_ps.ctr_model.layers.interactions import add_interactions, interactions_backward
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import EmbeddingTable
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema

LINEAR, EMBEDDING = "linear", "embedding"


@keeps_origin
class Fm(ClickModel):
    """A factorization machine."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"),
        "it multiplies the embeddings of all pairs of keys: nothing is pooled, and all have one dim",
    )

    def __init__(self, schema: Schema, *, dim: int = 10, init_range: float = 0.01) -> None:
        """Builds the model; raises ValueError if the width is less than 1, or the range negative."""
        require_widths(dim=dim)
        require_range(init_range=init_range)
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
