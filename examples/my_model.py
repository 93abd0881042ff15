"""A model of one's own, in plain numpy: numbers turn the embeddings of some slots up and down.

    z = bias + sum over keys of w_key + p . (dense W)                         [B]
    p = sum over the keys of the chosen slots of v_key                        [B, D]
    sigmoid(z)

The weights w of all slots stand in a table of dim 1 that asks for FTRL; the embeddings v of the chosen slots
in one of dim D, trained as the job says. `examples/my_model.toml` trains it, docs/models.md explains it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.losses import binary_cross_entropy, sigmoid_probabilities
from ctr_model.models.checks import (
    OwnWorkspace,
    labels_of,
    own_workspace,
    require_batch,
    require_grads,
    require_widths,
)
from ctr_model.models.model import EmbeddingTable, Lookup, StepResult, Workspace
from ctr_model.parameters import FlatLayout, Floats, Segment
from ctr_model.schema import Schema


class MyModel:
    """The model of the module's docstring."""

    def __init__(self, schema: Schema, *, slots: Sequence[str], dim: int = 4) -> None:
        """Takes the columns of a batch, and options of a job: the chosen slots by name, and D."""
        if not slots:
            raise ValueError("slots is empty: choose at least one")
        require_widths(dim=dim)
        self._schema = schema
        self.tables = (
            EmbeddingTable(
                name="weight",
                dim=1,
                optimizer={"name": "ftrl", "learning_rate": 0.1, "beta": 0.03},
            ),
            EmbeddingTable(
                name="embedding",
                dim=dim,
                init_range=0.1,
                slots=tuple(schema.slot_index(slot) for slot in slots),
            ),
        )
        self.segments = (
            Segment(name="gate", shape=(len(schema.dense), dim), init_std=0.1),
            Segment(name="bias", shape=(1,), init_std=0.0),
        )
        self._layout = FlatLayout(self.segments)
        self.num_params = self._layout.length

    def workspace(self, max_batch_size: int) -> OwnWorkspace:
        """Returns a workspace without buffers: this model makes new arrays in each step."""
        return OwnWorkspace(self, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]."""
        own_workspace(self, workspace, OwnWorkspace)
        require_batch(self._schema, self.tables, batch, lookups, workspace)
        gate, bias = self._layout.views(params)
        probabilities = np.empty(batch.size, np.float32)
        sigmoid_probabilities(
            _logits(bias, lookups["weight"], _pool(lookups["embedding"]), batch.dense @ gate),
            probabilities,
        )
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
        """Fills the gradients of the loss summed over the examples, by the chain rule from that of z."""
        own_workspace(self, workspace, OwnWorkspace)
        labels = labels_of(batch)
        require_batch(self._schema, self.tables, batch, lookups, workspace)
        require_grads(lookups, sparse_grads)
        gate, bias = self._layout.views(params)
        gate_grad, bias_grad = self._layout.views(dense_grad)  # views: writing fills dense_grad

        pooled, gated = _pool(lookups["embedding"]), batch.dense @ gate  # [B, D]
        logits = _logits(bias, lookups["weight"], pooled, gated)  # [B]
        probabilities, grad = np.empty_like(logits), np.empty_like(logits)  # [B]
        loss = binary_cross_entropy(logits, labels, probabilities, grad)

        bias_grad[0] = grad.sum()
        gate_grad[:] = batch.dense.T @ (grad[:, None] * pooled)  # [num_dense, D]
        _scatter(grad[:, None], lookups["weight"], sparse_grads["weight"])
        _scatter(grad[:, None] * gated, lookups["embedding"], sparse_grads["embedding"])
        return StepResult(loss, probabilities)


def _logits(bias: Floats, weight: Lookup, pooled: Floats, gated: Floats) -> Floats:
    """Returns z float32[B]."""
    logits: Floats = bias[0] + _pool(weight)[:, 0] + (pooled * gated).sum(axis=1)
    return logits


def _pool(lookup: Lookup) -> Floats:
    """Returns each example's sum of rows, float32[B, D]."""
    batch_size = lookup.offsets[:-1].size // lookup.num_slots
    pooled = np.zeros((batch_size, lookup.rows.shape[1]), np.float32)
    np.add.at(pooled, _examples(lookup), lookup.rows[lookup.inverse])
    return pooled


def _scatter(grad: Floats, lookup: Lookup, out: Floats) -> None:
    """Overwrites `out` float32[N, D], the gradient of rows, from that of `_pool`, float32[B, D]."""
    out[:] = 0
    np.add.at(out, lookup.inverse, grad[_examples(lookup)])


def _examples(lookup: Lookup) -> NDArray[np.int64]:
    """Returns for each occurrence of a key the example that it stands in, int64[L]."""
    starts = lookup.offsets[:: lookup.num_slots]  # [B + 1]
    return np.repeat(np.arange(starts.size - 1), np.diff(starts))
