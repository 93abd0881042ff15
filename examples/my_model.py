"""A user-defined model in plain numpy: dense features gate the embeddings of some slots.

    z = bias + sum over keys of w_key + p . (dense W)                         [B]
    p = sum over the keys of the chosen slots of v_key                        [B, D]
    sigmoid(z)

The weights w of all slots are in a table of dim 1 with FTRL. The embeddings v of the chosen slots are in a
table of dim D with the job's sparse optimizer. `examples/my_model.toml` trains the model, docs/models.md
explains it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps import Schema
from ctr_ps.models import (
    Batch,
    ClickModel,
    EmbeddingTable,
    Floats,
    Lookup,
    Segment,
    require_widths,
)


class MyModel(ClickModel):
    """The model of the module's docstring."""

    def __init__(self, schema: Schema, *, slots: Sequence[str], dim: int = 4) -> None:
        """Declares tables and dense parameters; `slots` names the chosen slots, `dim` is D."""
        if not slots:
            raise ValueError("slots is empty: choose at least one")
        require_widths(dim=dim)
        weight = EmbeddingTable(
            name="weight",
            dim=1,
            optimizer={"name": "ftrl", "learning_rate": 0.1, "beta": 0.03},
        )
        embedding = EmbeddingTable(
            name="embedding",
            dim=dim,
            init_range=0.1,
            slots=tuple(schema.slot_index(slot) for slot in slots),
        )
        gate = Segment(name="gate", shape=(schema.num_dense, dim), init_std=0.1)
        bias = Segment(name="bias", shape=(1,), init_std=0.0)
        super().__init__(schema, tables=[weight, embedding], segments=[gate, bias], biases=[bias])

    def forward(
        self,
        tensors: Sequence[Floats],
        batch: Batch,
        lookups: Mapping[str, Lookup],
        buffers: None,
        logits: Floats,
    ) -> None:
        """Overwrites `logits` float32[B] with z."""
        gate, bias = tensors
        pooled, gated = _pool(lookups["embedding"]), batch.dense @ gate  # [B, D]
        logits[:] = bias[0] + _pool(lookups["weight"])[:, 0] + (pooled * gated).sum(axis=1)

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
        """Overwrites all gradients, by the chain rule from `logit_grad` float32[B]."""
        gate, _ = tensors
        gate_grad, bias_grad = tensor_grads
        pooled, gated = _pool(lookups["embedding"]), batch.dense @ gate  # [B, D]
        grad = logit_grad[:, None]  # [B, 1]
        bias_grad[0] = logit_grad.sum()
        gate_grad[:] = batch.dense.T @ (grad * pooled)  # [num_dense, D]
        _scatter(grad, lookups["weight"], sparse_grads["weight"])
        _scatter(grad * gated, lookups["embedding"], sparse_grads["embedding"])


def _pool(lookup: Lookup) -> Floats:
    """Returns the sum of rows of each example, float32[B, D]."""
    batch_size = lookup.offsets[:-1].size // lookup.num_slots
    pooled = np.zeros((batch_size, lookup.rows.shape[1]), np.float32)
    np.add.at(pooled, _examples(lookup), lookup.rows[lookup.inverse])
    return pooled


def _scatter(grad: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[N, D] with the gradient of the rows, from that of `_pool`, float32[B, D]."""
    out[:] = 0
    np.add.at(out, lookup.inverse, grad[_examples(lookup)])


def _examples(lookup: Lookup) -> NDArray[np.int64]:
    """Returns the example of each key occurrence, int64[L]."""
    starts = lookup.offsets[:: lookup.num_slots]  # [B + 1]
    return np.repeat(np.arange(starts.size - 1), np.diff(starts))
