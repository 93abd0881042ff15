"""DIN: a multilayer perceptron over embeddings, with attention of histories to the shown item.

    X  = [ dense | pooled embedding of slot 1 | ... | of slot S ]             [B, n = num_dense + S * D]
         where that of a history is  u = a_1 h_1 + ... + a_n h_n,
         a_j = 1 + MLP([ h_j | t | h_j - t | h_j * t ])  for the pooled embedding t of its target
    A1 = relu(X W1 + b1)   ...   An = relu(A(n-1) Wn + bn)                    [B, H]
    sigmoid(An w + b)                                                         [B]

A history is a slot with keys in order of time, such as the items that a user has clicked; its target is the
slot of the shown item. Equal values in both share a key and a row (`shares` of the schema).

Zhou et al., "Deep interest network for click-through rate prediction", KDD 2018; differences from the paper
are explained in ctr_model/layers/attention.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.attention import Attention, AttentionBuffers
from ctr_ps.ctr_model.layers.mlp import Mlp, MlpBuffers
from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.lookup import Lookups, SparseGrads
from ctr_ps.ctr_model.models.checks import require_range, require_widths
from ctr_ps.ctr_model.models.click_model import ClickModel
from ctr_ps.ctr_model.models.origin import keeps_origin
from ctr_ps.ctr_model.parameters import Floats, Tensors
from ctr_ps.ctr_model.schema import Schema


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
        require_widths(
            dim=dim, hidden=hidden, attention_hidden=attention_hidden, max_length=max_length
        )
        require_range(init_range=init_range)
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
        self, tensors: Tensors, batch: Batch, lookups: Lookups, buffers: "_Buffers", logits: Floats
    ) -> None:
        x = buffers.mlp.input(batch.size)
        self._input.forward(batch.dense, lookups, x)
        of_mlp, *of_attentions = self._parts(tensors)
        for attention, table, own, of_one in self._each(buffers, of_attentions):
            attention.forward(of_one, lookups[table], own, x)
        logits[:] = self._mlp.forward(of_mlp, buffers.mlp, batch.size).reshape(-1)

    def backward(
        self,
        tensors: Tensors,
        batch: Batch,
        lookups: Lookups,
        buffers: "_Buffers",
        logit_grad: Floats,
        tensor_grads: Tensors,
        sparse_grads: SparseGrads,
    ) -> None:
        of_mlp, *of_attentions = self._parts(tensors)
        mlp_grads, *attention_grads = self._parts(tensor_grads)
        grad = self._mlp.backward(of_mlp, buffers.mlp, logit_grad.reshape(-1, 1), mlp_grads)
        each = list(self._each(buffers, of_attentions))
        for (attention, _, own, of_one), grads in zip(each, attention_grads, strict=True):
            attention.backward(of_one, own, grad, grads)
        self._input.backward(grad, lookups, sparse_grads)  # targets have all of their gradient now
        for attention, table, own, _ in each:
            attention.add_to_rows(lookups[table], own, sparse_grads[table])

    def buffers(self, max_batch_size: int) -> "_Buffers":
        return _Buffers(
            mlp=self._mlp.buffers(max_batch_size, self.products, self.dropout),
            attentions=[each.buffers(max_batch_size, self.products) for each in self._attentions],
        )

    def _each(
        self, buffers: "_Buffers", tensors: Sequence[Sequence[Floats]]
    ) -> "zip[tuple[Attention, str, AttentionBuffers, Sequence[Floats]]]":
        return zip(self._attentions, self._tables, buffers.attentions, tensors, strict=True)

    def _parts(self, tensors: Tensors) -> list[Sequence[Floats]]:
        parts, start = [], 0
        for segments in (self._mlp.segments, *(each.segments for each in self._attentions)):
            parts.append(tensors[start : start + len(segments)])
            start += len(segments)
        return parts


@dataclass(frozen=True, slots=True)
class _Buffers:
    mlp: MlpBuffers
    attentions: list[AttentionBuffers]


def _pairs(schema: Schema, histories: Mapping[str, str]) -> list[tuple[int, int]]:
    """Returns the histories with their targets, by number."""
    if not histories:
        raise ValueError(
            "histories is empty, and the schema has no slots that share keys: name a history and its "
            'target in the schema, as in shares = { history = "item" }'
        )
    pairs = []
    for name, of_name in histories.items():
        where = f"histories.{name}"
        history = schema.slot_index(name, where=where)
        target = schema.slot_index(of_name, where=where)
        if of_name in histories:
            raise ValueError(f"histories.{name} is {of_name!r}, which is a history itself")
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
            raise ValueError(f"slots.{name}.pooling: {name!r} is a history, which attention pools")
        if own.get("dim") != other.get("dim"):
            raise ValueError(
                f"slots.{name}.dim: the history {name!r} and its target {of_name!r} have the same rows, so "
                f"they need the same dim"
            )
