"""Models whose logit is a sum of parts: LR, wide & deep, FM and DeepFM.

    first-order    bias + sum over numbers of weight * number + sum over keys and crosses of w_key    [B]
    pairs          sum over pairs i < j of an example's keys of <v_i, v_j>                            [B]
    perceptron     An w + b,   A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                 [B]
                   X = [ dense | pooled v of slot 1 | ... | of slot S ]       [B, num_dense + S * D]

The weights w of keys are rows of a table of dim 1, their embeddings v of one of dim D; a key that occurs
twice in an example counts twice. Numbers have weights, but no embeddings. Only X is pooled: pairs are of all
keys. They are summed as

    z[b] = sum over j of <v_j, v_1 + ... + v_(j-1)>
    dz[b] / dv_i = (v_1 + ... + v_n) - v_i

which takes one pass over the n keys instead of their pairs, like Rendle's 1/2 (|sum of v|^2 - sum of |v|^2),
but without cancellation of large numbers.

    sigmoid(first-order)                        LR: logistic regression
    sigmoid(first-order + perceptron)           wide & deep
    sigmoid(first-order + pairs)                FM: a factorization machine
    sigmoid(first-order + pairs + perceptron)   DeepFM

Only wide & deep has crosses, and keeps the table of weights sparse by FTRL. Parts are trained jointly.

Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016. As there, the wide part covers
categorical features and crosses; in PaddlePaddle's examples it only covers the numbers. Rendle,
"Factorization machines", ICDM 2010. Guo, Tang, Ye, Li and He, "DeepFM: a factorization-machine based neural
network for CTR prediction", IJCAI 2017.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp
from ctr_ps.ctr_model.layers.pooling import (
    PooledSlots,
    Pooling,
    SlotOptions,
    require_range,
    require_widths,
)
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import keeps_origin
from ctr_ps.ctr_model.parameters import (
    EmbeddingTable,
    Floats,
    Lookup,
    Lookups,
    Segment,
    SparseGrads,
    Tensors,
)
from ctr_ps.ctr_model.schema import Schema


class _Buffers(NamedTuple):
    mlp: Any  # of the perceptron; None without one
    sums: Floats  # float32[B, D], of the embeddings of an example


class SummedModel(ClickModel):
    """A first-order part with the table `linear`, pairs of the rows of `pairs`, and a perceptron over `x`."""

    def __init__(
        self,
        schema: Schema,
        *,
        linear: EmbeddingTable,
        pairs: EmbeddingTable | None = None,
        x: PooledSlots | None = None,
        hidden: Sequence[int] = (),
    ) -> None:
        """Builds the model; None: without this part. Raises ValueError for a width in `hidden` below 1."""
        self._linear, self._pairs = linear.name, pairs
        self._deep: tuple[PooledSlots, Mlp] | None = None
        tables = [linear] if pairs is None else [linear, pairs]
        weight = Segment(name=f"{linear.name}.weight", shape=(schema.num_dense,), init_std=0.0)
        bias = Segment(name=f"{linear.name}.bias", shape=(1,), init_std=0.0)
        segments = [weight, bias]
        if x is not None:
            require_widths(hidden=hidden)
            mlp = Mlp((x.width, *hidden, 1))
            self._deep, tables = (x, mlp), [linear, *x.tables]
            segments += mlp.segments
        super().__init__(schema, tables=tables, segments=segments, biases=[bias])

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: _Buffers, logits: Floats
    ) -> None:
        weight, bias, *of_mlp = tensors
        first_order(batch.dense, lookups[self._linear], weight, bias, logits)
        if self._pairs is not None:
            add_interactions(lookups[self._pairs.name], buffers.sums[: batch.size], logits)
        if self._deep is not None:
            x, mlp = self._deep
            x.forward(batch.dense, lookups, buffers.mlp.input(batch.size))
            logits += mlp.forward(of_mlp, buffers.mlp, batch.size).reshape(-1)

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
        linear, linear_grad = lookups[self._linear], sparse_grads[self._linear]
        first_order_backward(logit_grad, batch.dense, linear, linear_grad, weight_grad, bias_grad)
        if self._deep is not None:
            x, mlp = self._deep
            x_grad = mlp.backward(tensors[2:], buffers.mlp, logit_grad.reshape(-1, 1), mlp_grads)
            x.backward(x_grad, lookups, sparse_grads)
        if self._pairs is not None:
            embedding_grad = sparse_grads[self._pairs.name]
            if self._deep is None:
                embedding_grad.fill(0.0)
            sums, embedding = buffers.sums[: batch.size], lookups[self._pairs.name]
            interactions_backward(logit_grad, sums, embedding, embedding_grad)

    def buffers(self, max_batch_size: int) -> _Buffers:
        mlp = self._deep and self._deep[1].buffers(max_batch_size, self.products, self.dropout)
        dim = 0 if self._pairs is None else self._pairs.dim
        return _Buffers(mlp, np.empty((max_batch_size, dim), np.float32))


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


@keeps_origin
class LogisticRegression(SummedModel):
    """Logistic regression."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"), "it has one weight for each key, and adds the weights of all keys"
    )

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, linear=EmbeddingTable(name="linear", dim=1, learning_rate=0.1))


# Gradients are means over a batch, so this `beta` corresponds to 1 in the formula with sums for batches of
# about 30 examples; larger batches need smaller `beta` and `l1`.
_WIDE_OPTIMIZER: Mapping[str, str | float] = {
    "name": "ftrl",
    "learning_rate": 0.1,
    "beta": 0.03,
    "l1": 0.01,
}


@keeps_origin
class WideDeep(SummedModel):
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
        x = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        pairs = tuple(
            (schema.slot_index(a, where="crosses"), schema.slot_index(b, where="crosses"))
            for a, b in crosses
        )
        wide = EmbeddingTable(name="wide", dim=1, crosses=pairs, optimizer=_WIDE_OPTIMIZER)
        super().__init__(schema, linear=wide, x=x, hidden=hidden)


_LINEAR = EmbeddingTable(name="linear", dim=1)


@keeps_origin
class Fm(SummedModel):
    """A factorization machine."""

    refused_options = dict.fromkeys(
        ("pooling", "slots"),
        "it multiplies the embeddings of all pairs of keys, so nothing is pooled and all slots have one dim",
    )

    def __init__(self, schema: Schema, *, dim: int = 10, init_range: float = 0.01) -> None:
        """Builds the model; raises ValueError if the width is less than 1, or the range negative."""
        require_widths(dim=dim)
        require_range(init_range)
        embedding = EmbeddingTable(name="embedding", dim=dim, init_range=init_range)
        super().__init__(schema, linear=_LINEAR, pairs=embedding)


@keeps_origin
class DeepFm(SummedModel):
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
        x = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        for name, options in slots.items():
            if options.get("dim", dim) != dim:
                raise ValueError(
                    f"slots.{name}.dim is {options['dim']}, but the factorization machine multiplies the "
                    f"embeddings of all slots, so all must have dim = {dim}"
                )
        super().__init__(schema, linear=_LINEAR, pairs=x.tables[0], x=x, hidden=hidden)
