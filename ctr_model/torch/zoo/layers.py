"""Layers that several models have: inputs, and fully connected layers.

Those in the second half have parameters with the names and shapes of numpy models, whose checkpoints they
read.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding


class Fields(nn.Module):
    """All features as vectors of one width: float32[B, F, D], where F = num_dense + S.

    A number x_i is the vector x_i v_i with a learned v_i (equation 4 of the paper of AutoInt); a slot has the
    pooled embedding of its keys.
    """

    def __init__(self, schema: Schema, *, dim: int, init_range: float, pooling: Pooling) -> None:
        super().__init__()
        self.count = schema.num_dense + len(schema.slots)
        self.embedding = SlotEmbedding(
            dim=dim, init_range=init_range, pooling=pooling, table="embedding"
        )
        self.numbers = nn.Parameter(torch.empty(schema.num_dense, dim).uniform_(-0.1, 0.1))

    def forward(self, batch: Batch) -> Tensor:
        """Returns float32[B, F, D]."""
        return torch.cat([batch.dense.unsqueeze(2) * self.numbers, self.embedding(batch)], dim=1)


def hidden_layers(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Returns fully connected layers from widths[0] to widths[-1] values, relu and dropout after each."""
    layers: list[nn.Module] = []
    for pair in pairwise(widths):
        layers += [nn.Linear(*pair), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers)


class Mlp(nn.Sequential):
    """Hidden layers, then a linear layer `out` of `outputs` values."""

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int = 1, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [inputs, *hidden]
        self.hidden = hidden_layers(widths, dropout)
        self.out = nn.Linear(widths[-1], outputs)


class PooledInput(nn.Module):
    """The input X = [ dense | pooled embedding of slot 1 | ... | of slot S ], float32[B, width].

    `width` and tables are those of `PooledSlots`: a slot may have a `dim` and `pooling` of its own, and each
    width has its own table. Slots in `apart` are pooled by the caller.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        init_range: float,
        pooling: Pooling,
        slots: Mapping[str, SlotOptions] = {},
        apart: Collection[str] = (),
    ) -> None:
        super().__init__()
        plan = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        self.width, self._schema, self._columns = plan.width, schema, plan.columns
        columns = zip(schema.slots, plan.columns, strict=True)
        self.dims = {name: column.stop - column.start for name, column in columns}
        self._dim, self._init_range = dim, init_range
        groups: dict[tuple[int, object], list[str]] = {}
        for name in schema.slots:
            if name not in apart:
                own = slots.get(name, {}).get("pooling", pooling)
                groups.setdefault((self.dims[name], own), []).append(name)
        self.pooled = nn.ModuleList(self.embedding(of, own) for (_, own), of in groups.items())

    def embedding(self, slots: Sequence[str], pooling: Any) -> SlotEmbedding:
        """Returns an embedding of slots of one width."""
        width = self.dims[slots[0]]
        return SlotEmbedding(
            slots,
            dim=width,
            pooling=pooling,
            init_range=self._init_range,
            table="embedding" if width == self._dim else f"embedding_{width}",
        )

    def slots(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the pooled embedding float32[B, D] of each slot that is not apart."""
        return {
            name: vector
            for each in self.pooled
            for name, vector in zip(each.slots, each(batch).unbind(1), strict=True)
        }

    def concatenated(self, batch: Batch, vectors: Mapping[str, Tensor]) -> Tensor:
        """Returns X, given the vector of each slot."""
        return torch.cat([batch.dense, *(vectors[name] for name in self.dims)], dim=1)

    def forward(self, batch: Batch) -> Tensor:
        """Returns X, where no slot is apart."""
        if len(self.pooled) == 1:
            return torch.cat([batch.dense, self.pooled[0](batch).flatten(1)], dim=1)
        return self.concatenated(batch, self.slots(batch))

    def columns(self, slots: Sequence[str]) -> Tensor:
        """Returns the columns of X that are of some slots, int64; SchemaError for an unknown one."""
        chosen = [self._columns[self._schema.slot_index(slot)] for slot in slots]
        places = [place for each in chosen for place in range(each.start, each.stop)]
        return torch.tensor(places, dtype=torch.int64)


class Weight(nn.Module):
    """A product with a matrix `weight` [inputs, outputs], normal with standard deviation 1 / sqrt(inputs)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=inputs**-0.5))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns x W, plus the bias."""
        return functional.linear(x, self.weight.t(), self.bias)


class Perceptron(nn.Module):
    """Layers "1" to "n" with relu and dropout between them."""

    def __init__(self, widths: Sequence[int], dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        for number, pair in enumerate(pairwise(widths), start=1):
            self.add_module(str(number), Weight(*pair))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32[B, widths[-1]]."""
        *hidden, last = self.children()
        for layer in hidden:
            x = functional.dropout(layer(x).relu(), self.dropout, self.training)
        found: Tensor = last(x)
        return found


def numbered(module: nn.Module, name: str, layers: Iterable[nn.Module]) -> nn.ModuleList:
    """Returns layers whose parameters are named after their places name1, name2, ... in the module."""
    found = nn.ModuleList(layers)
    for number, layer in enumerate(found, start=1):
        module.add_module(f"{name}{number}", layer)
    return found
