"""DIN: a multilayer perceptron over embeddings, with attention of histories to the shown item.

    X  = [ dense | pooled embedding of slot 1 | ... | of slot S ]             [B, n = num_dense + S * D]
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(An w + b)                                                         [B]

A history is a slot with keys in order of time, such as the items that a user has clicked; its target is the
slot of the shown item. Equal values in both share a key and a row (`shares` of the schema). In X a history
has a weighted sum over its keys:

    h_1, ..., h_n   rows of the slot's last n keys, in order          [D]
    t               pooled embedding of the target                    [D]
    a_j = 1 + MLP([ h_j | t | h_j - t | h_j * t ])                    the activation unit
    u   = a_1 h_1 + ... + a_n h_n                                     [D]

The weights are not normalized: three keys like the target give a larger u than one. The MLP starts near zero,
so u starts as the sum of the rows. A history without keys is zeros.

Zhou et al., "Deep interest network for click-through rate prediction", KDD 2018. The paper has PReLU or Dice
between layers; here it is relu, because Dice uses batch statistics: a prediction would depend on the examples
beside it. The 1 is the initial bias of the last layer.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.layers.products import NewProduct
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.model import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Lookup, Lookups, SparseGrads, Tensors
from ctr_ps.ctr_model.schema import Schema


class AttentionBuffers:
    """Buffers of one step, which grow as needed; `starts` int64[B + 1] bounds the rows of the examples."""

    def __init__(self, mlp: Mlp, max_batch_size: int, new_product: NewProduct) -> None:
        self.starts = np.zeros(max_batch_size + 1, np.int64)
        self._mlp, self._new_product = mlp, new_product
        self._capacity = 0
        self.make_room(max(1, max_batch_size))

    def make_room(self, size: int) -> None:
        """Grows the matrices to at least `size` rows; their content is lost."""
        if size > self._capacity:
            self._capacity = max(size, 2 * self._capacity)
            self.mlp = self._mlp.buffers(self._capacity, self._new_product)
            self.weights_grad = np.empty((self._capacity, 1), np.float32)


class Attention:
    """Attention of one history to its target, both of which have columns in the input X of a network."""

    def __init__(
        self,
        *,
        slot: int,
        max_length: int,
        history: slice,
        target: slice,
        hidden: Sequence[int],
        name: str,
    ) -> None:
        """Takes the last `max_length` keys of `slot`; u and t have columns `history` and `target` of X."""
        self._slot, self._max_length = slot, max_length
        self._u, self._t = history.start, target.start
        self._dim = history.stop - history.start
        self._mlp = Mlp((4 * self._dim, *hidden, 1), name=name)
        self.segments = self._mlp.segments

    def buffers(self, max_batch_size: int, new_product: NewProduct) -> AttentionBuffers:
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return AttentionBuffers(self._mlp, max_batch_size, new_product)

    def forward(
        self, tensors: Tensors, lookup: Lookup, buffers: AttentionBuffers, x: Floats
    ) -> None:
        """Overwrites the columns of u in `x` float32[B, ...]; `lookup` is of the history's table."""
        starts = buffers.starts[: len(x) + 1]
        _count_last(lookup, self._slot, self._max_length, starts)
        size = int(starts[-1])
        buffers.make_room(size)
        pairs = buffers.mlp.input(size)
        _pair(lookup, self._slot, starts, x, self._t, pairs)
        weights = self._mlp.forward(tensors, buffers.mlp, size)
        weights += np.float32(1.0)
        _add_up(weights, pairs, starts, self._dim, self._u, x)

    def backward(
        self, tensors: Tensors, buffers: AttentionBuffers, grad: Floats, tensor_grads: Tensors
    ) -> None:
        """Overwrites the gradients of all tensors, and adds that of t to its columns in `grad`, of X.

        Gradients of the rows stay in `buffers` for `add_to_rows`.
        """
        starts = buffers.starts[: len(grad) + 1]
        size = int(starts[-1])
        pairs, weights = buffers.mlp.input(size), buffers.mlp.outputs(size)[-1]
        weights_grad = buffers.weights_grad[:size]
        _add_up_backward(grad, pairs, starts, self._dim, self._u, weights_grad)
        pairs_grad = self._mlp.backward(tensors, buffers.mlp, weights_grad, tensor_grads)
        _pair_backward(weights, pairs, starts, self._u, self._t, self._dim, pairs_grad, grad)

    def add_to_rows(self, lookup: Lookup, buffers: AttentionBuffers, out: Floats) -> None:
        """Adds the gradient of the history's rows to `out` float32[N, D]; called after `backward`."""
        size = (lookup.offsets.size - 1) // lookup.num_slots
        starts = buffers.starts[: size + 1]
        rows_grad = buffers.mlp.grads(int(starts[-1]))[0]
        _add_to_rows(rows_grad, lookup, self._slot, starts, out)


@kernel
def _count_last(lookup: Lookup, slot: int, max_length: int, starts: NDArray[np.int64]) -> None:
    """Overwrites `starts` with the first row of each example, of at most `max_length` keys."""
    starts[0] = 0
    for b in range(starts.size - 1):
        place = b * lookup.num_slots + slot
        length = lookup.offsets[place + 1] - lookup.offsets[place]
        starts[b + 1] = starts[b] + min(length, max_length)


@kernel
def _pair(
    lookup: Lookup,
    slot: int,
    starts: NDArray[np.int64],
    x: Floats,
    target: int,
    pairs: Floats,
) -> None:
    """Overwrites `pairs` with [ h | t | h - t | h * t ] of each key."""
    rows, dim = lookup.rows, lookup.rows.shape[1]
    for b in range(x.shape[0]):
        stop = lookup.offsets[b * lookup.num_slots + slot + 1]
        for j in range(starts[b], starts[b + 1]):
            row = np.uintp(lookup.inverse[stop - (starts[b + 1] - j)])
            for d in range(dim):
                h, t = rows[row, np.uintp(d)], x[b, target + d]
                pairs[j, d] = h
                pairs[j, dim + d] = t
                pairs[j, 2 * dim + d] = h - t
                pairs[j, 3 * dim + d] = h * t


@kernel
def _add_up(
    weights: Floats, pairs: Floats, starts: NDArray[np.int64], dim: int, column: int, x: Floats
) -> None:
    for b in range(x.shape[0]):
        for d in range(dim):
            x[b, column + d] = np.float32(0.0)
        for j in range(starts[b], starts[b + 1]):
            for d in range(dim):
                x[b, column + d] += weights[j, 0] * pairs[j, d]


@kernel
def _add_up_backward(
    grad: Floats, pairs: Floats, starts: NDArray[np.int64], dim: int, column: int, out: Floats
) -> None:
    for b in range(grad.shape[0]):
        for j in range(starts[b], starts[b + 1]):
            total = np.float32(0.0)
            for d in range(dim):
                total += grad[b, column + d] * pairs[j, d]
            out[j, 0] = total


@kernel
def _pair_backward(
    weights: Floats,
    pairs: Floats,
    starts: NDArray[np.int64],
    history: int,
    target: int,
    dim: int,
    pairs_grad: Floats,
    grad: Floats,
) -> None:
    """Adds the gradient of t to its columns in `grad`; overwrites `pairs_grad[:, :dim]` with that of h."""
    for b in range(grad.shape[0]):
        for j in range(starts[b], starts[b + 1]):
            for d in range(dim):
                h, t = pairs[j, d], pairs[j, dim + d]
                of_difference, of_product = pairs_grad[j, 2 * dim + d], pairs_grad[j, 3 * dim + d]
                grad[b, target + d] += pairs_grad[j, dim + d] - of_difference + of_product * h
                pairs_grad[j, d] += (
                    of_difference + of_product * t + weights[j, 0] * grad[b, history + d]
                )


@kernel
def _add_to_rows(
    grad: Floats, lookup: Lookup, slot: int, starts: NDArray[np.int64], out: Floats
) -> None:
    """Adds `grad[:, :D]` of each key to the gradient of its row."""
    for b in range(starts.size - 1):
        stop = lookup.offsets[b * lookup.num_slots + slot + 1]
        for j in range(starts[b], starts[b + 1]):
            row = np.uintp(lookup.inverse[stop - (starts[b + 1] - j)])
            for d in range(out.shape[1]):
                out[row, np.uintp(d)] += grad[j, d]


_Buffers = tuple[MlpBuffers, list[AttentionBuffers]]


@keeps_origin
class Din(ClickModel):
    """Deep interest network."""

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        histories: Mapping[str, str] | None = None,
        attention_hidden: Sequence[int] = (36,),
        max_length: int = 50,
    ) -> None:
        """Builds the network; options and errors are those of `CtrDnn`, and three more.

        `histories` maps a history to its target, by default `schema.shares`; both share keys and width. An
        MLP with hidden widths `attention_hidden` weighs the last `max_length` keys of a history.
        """
        require_widths(hidden=hidden, attention_hidden=attention_hidden, max_length=max_length)
        pairs = _pairs(schema, schema.shares if histories is None else histories)
        _require_poolable(schema, pairs, slots)
        self._input = PooledSlots(
            schema,
            dim=dim,
            init_range=init_range,
            pooling=pooling,
            slots=slots,
            elsewhere=[history for history, _ in pairs],
        )
        self._attentions = [
            Attention(
                slot=self._input.table_of(history)[1],
                max_length=max_length,
                history=self._input.columns[history],
                target=self._input.columns[target],
                hidden=attention_hidden,
                name=f"attention.{schema.slots[history]}.",
            )
            for history, target in pairs
        ]
        self._tables = [self._input.table_of(history)[0] for history, _ in pairs]
        self._mlp = Mlp((self._input.width, *hidden, 1))
        of_attentions = [segment for each in self._attentions for segment in each.segments]
        super().__init__(
            schema,
            tables=self._input.tables,
            segments=[*self._mlp.segments, *of_attentions],
            biases=self._mlp.segments[-1:],
        )

    def forward(
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: _Buffers, logits: Floats
    ) -> None:
        of_layers, own_buffers = buffers
        x = of_layers.input(batch.size)
        self._input.forward(batch.dense, lookups, x)
        of_mlp, *of_attentions = self._parts(tensors)
        for attention, table, own, of_one in self._each(own_buffers, of_attentions):
            attention.forward(of_one, lookups[table], own, x)
        logits[:] = self._mlp.forward(of_mlp, of_layers, batch.size).reshape(-1)

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
        of_layers, own_buffers = buffers
        of_mlp, *of_attentions = self._parts(tensors)
        mlp_grads, *attention_grads = self._parts(tensor_grads)
        grad = self._mlp.backward(of_mlp, of_layers, logit_grad.reshape(-1, 1), mlp_grads)
        each = list(self._each(own_buffers, of_attentions))
        for (attention, _, own, of_one), grads in zip(each, attention_grads, strict=True):
            attention.backward(of_one, own, grad, grads)
        self._input.backward(grad, lookups, sparse_grads)  # targets have all of their gradient now
        for attention, table, own, _ in each:
            attention.add_to_rows(lookups[table], own, sparse_grads[table])

    def buffers(self, max_batch_size: int) -> _Buffers:
        return (
            self._mlp.buffers(max_batch_size, self.products, self.dropout),
            [each.buffers(max_batch_size, self.products) for each in self._attentions],
        )

    def _each(
        self, buffers: Sequence[AttentionBuffers], tensors: Sequence[Sequence[Floats]]
    ) -> "zip[tuple[Attention, str, AttentionBuffers, Sequence[Floats]]]":
        return zip(self._attentions, self._tables, buffers, tensors, strict=True)

    def _parts(self, tensors: Tensors) -> list[Sequence[Floats]]:
        parts, start = [], 0
        for segments in (self._mlp.segments, *(each.segments for each in self._attentions)):
            parts.append(tensors[start : start + len(segments)])
            start += len(segments)
        return parts


def _pairs(schema: Schema, histories: Mapping[str, str]) -> list[tuple[int, int]]:
    if not histories:
        raise ValueError(
            "histories is empty, and no slots of the schema share keys: name a history and its target in "
            'the schema, such as shares = { history = "item" }'
        )
    pairs = []
    for name, of_name in histories.items():
        where = f"histories.{name}"
        history = schema.slot_index(name, where=where)
        target = schema.slot_index(of_name, where=where)
        if of_name in histories:
            raise ValueError(
                f"histories.{name} is {of_name!r}, which is itself a history: name a slot that is not"
            )
        if schema.slot_numbers[history] != schema.slot_numbers[target]:
            raise ValueError(
                f"histories.{name} is {of_name!r}, but equal values of the two slots have different keys: "
                f'share them in the schema, shares = {{ {name} = "{of_name}" }}'
            )
        pairs.append((history, target))
    return pairs


def _require_poolable(
    schema: Schema, pairs: Sequence[tuple[int, int]], slots: Mapping[str, SlotOptions]
) -> None:
    """Refuses pooling for a history, and another width than that of its target."""
    for history, target in pairs:
        name, of_name = schema.slots[history], schema.slots[target]
        own, other = slots.get(name, {}), slots.get(of_name, {})
        if "pooling" in own:
            raise ValueError(
                f"slots.{name}.pooling: {name!r} is a history, pooled by attention: remove this option"
            )
        if own.get("dim") != other.get("dim"):
            raise ValueError(
                f"slots.{name}.dim: the history {name!r} and its target {of_name!r} have the same rows, so "
                f"they need the same dim"
            )
