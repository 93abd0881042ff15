"""Models that attend to histories: slots with keys in order of time; see docs/models.md."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Mlp, Perceptron, PooledInput, numbered


class Inputs(PooledInput):
    """The numbers, pooled slots, and rows of histories."""

    def __init__(
        self,
        schema: Schema,
        dim: int,
        init_range: float,
        pooling: Pooling,
        slots: Mapping[str, SlotOptions],
        histories: Mapping[str, str] | None,
        max_length: int,
    ) -> None:
        require_widths(max_length=max_length)
        targets = dict(schema.shares if histories is None else histories)
        _require_histories(schema, targets, slots)
        super().__init__(schema, dim, init_range, pooling, slots, apart=targets)
        self.targets, self._max_length = targets, max_length
        self.rows = nn.ModuleList(self.embedding([name], "none") for name in targets)

    def histories(self, batch: Batch) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yields each history, its target, its rows float32[B, T, D] and their ages int64[B, T].

        The last key has age 0; places without a key, or before the last `max_length`, have age -1.
        """
        for (history, target), embedding in zip(self.targets.items(), self.rows, strict=True):
            rows, is_there = (each.squeeze(1) for each in embedding(batch))
            places = torch.arange(rows.shape[1], device=rows.device)
            ages = (is_there.sum(1, keepdim=True) - 1 - places).clamp(min=-1)
            yield history, target, rows, ages.masked_fill(ages >= self._max_length, -1)


def _require_histories(
    schema: Schema, targets: Mapping[str, str], slots: Mapping[str, SlotOptions]
) -> None:
    """Raises ValueError unless each target is another slot with the same keys and dim."""
    if not targets:
        raise ValueError(
            "histories is empty, and no slots of the schema share keys: name a history and its target in "
            'the schema, such as shares = { history = "item" }'
        )
    for name, target in targets.items():
        where = f"histories.{name}"
        history, shown = (schema.slot_index(each, where=where) for each in (name, target))
        if target in targets:
            raise ValueError(
                f"{where} is {target!r}, which is itself a history: name a slot that is not"
            )
        if schema.slot_numbers[history] != schema.slot_numbers[shown]:
            raise ValueError(
                f"{where} is {target!r}, but equal values of the two slots have different keys: "
                f'share them in the schema, shares = {{ {name} = "{target}" }}'
            )
        own = slots.get(name, {})
        if "pooling" in own:
            raise ValueError(
                f"slots.{name}.pooling: {name!r} is a history, pooled by attention: remove this option"
            )
        if own.get("dim") != slots.get(target, {}).get("dim"):
            raise ValueError(
                f"slots.{name}.dim: the history {name!r} and its target {target!r} have the same rows, so "
                "they need the same dim"
            )


class Din(nn.Module):
    """DIN, deep interest network (Zhou et al., KDD 2018, arXiv 1706.06978).

    logit = MLP([dense | slot 1 | ... | slot S])

    A history with the last keys h_1, ..., h_n and the pooled embedding t of its target has the vector

    u = a_1 h_1 + ... + a_n h_n,   a_j = 1 + MLP([h_j | t | h_j - t | h_j * t])     (equation 3)

    The weights are not normalized: three keys like the target give a larger u than one. The MLP starts near
    zero, so u starts as the sum of the rows. Layers have relu where the paper has PReLU or Dice.
    """

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
        dropout: float = 0.0,
    ) -> None:
        """Builds the network; `histories` maps a history to its target, by default `schema.shares`."""
        require_widths(hidden=hidden, attention_hidden=attention_hidden)
        inputs = Inputs(schema, dim, init_range, pooling, slots, histories, max_length)
        super().__init__()
        mlp = Perceptron((inputs.width, *hidden, 1), dropout)
        numbered(self, "fc", mlp.children())
        self.mlp = mlp
        self.inputs = inputs
        self.attention = nn.Module()
        self._attentions = {
            history: Perceptron((4 * inputs.dims[history], *attention_hidden, 1))
            for history in inputs.targets
        }
        # Not by add_module, which refuses some names of slots, such as "type" or one with a dot.
        self.attention._modules.update(self._attentions)
        self.logit_biases = (f"fc{len(hidden) + 1}.bias",)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        vectors = self.inputs.slots(batch)
        for history, target, rows, ages in self.inputs.histories(batch):
            t = vectors[target].unsqueeze(1).expand_as(rows)
            weights = 1 + self._attentions[history](torch.cat([rows, t, rows - t, rows * t], dim=2))
            vectors[history] = (weights * rows).masked_fill(ages.unsqueeze(2) < 0, 0.0).sum(1)
        logits: Tensor = self.mlp(self.inputs.concatenated(batch, vectors))
        return logits


class Bst(nn.Module):
    """BST, behavior sequence transformer (Chen et al., DLP-KDD 2019, arXiv 1905.06874).

    logit = MLP([dense | slot 1 | ... | slot S])

    A history with the last keys h_1, ..., h_n, of ages n - 1 to 0, and the target t has the vector of t in
    the last of `layers` layers:

    Z = [h_1 + p_(n - 1) | ... | h_n + p_0 | t + q]          p: learned for each age, in place of a time
    S = Z + MultiHead(LN(Z)),   Z' = S + W_2 leaky_relu(W_1 LN(S) + b_1) + b_2      (equations 4 and 5)

    The paper has LN after each sum: then attention begins with rows near zero, which it hardly tells apart.
    It also flattens Z', whose length is fixed there.
    """

    logit_biases = ("mlp.out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        layers: int = 1,
        heads: int = 2,
        feed_forward: int = 64,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        histories: Mapping[str, str] | None = None,
        max_length: int = 50,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_widths(hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward)
        self.inputs = Inputs(schema, dim, init_range, pooling, slots, histories, max_length)
        self.transformers = nn.ModuleList()
        self.positions = nn.ParameterList()
        for history in self.inputs.targets:
            width = self.inputs.dims[history]
            if width % heads:
                raise ValueError(f"heads is {heads}, expected a divisor of dim, {width}")
            sizes = width, heads, feed_forward, dropout, functional.leaky_relu
            of_history = [
                nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
                for _ in range(layers)
            ]
            self.transformers.append(nn.ModuleList(of_history))
            # The last row is q, of the target.
            self.positions.append(nn.Parameter(init_range * torch.randn(max_length + 1, width)))
        self.mlp = Mlp(self.inputs.width, hidden, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        vectors = self.inputs.slots(batch)
        histories = self.inputs.histories(batch)
        each = zip(histories, self.positions, self.transformers, strict=True)
        for (history, target, rows, of_rows), positions, transformer in each:
            ages = functional.pad(of_rows, (0, 1), value=len(positions) - 1)
            z = torch.cat([rows, vectors[target].unsqueeze(1)], dim=1)  # [B, T + 1, D]
            z = z + positions[ages.clamp(min=0)]
            for layer in transformer:
                z = layer(z, src_key_padding_mask=ages < 0)
            vectors[history] = z[:, -1]
        logits: Tensor = self.mlp(self.inputs.concatenated(batch, vectors))
        return logits
