"""Layers whose parameters have the names and shapes of numpy models, whose checkpoints they read."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding


class PooledInput(nn.Module):
    """The input X = [ dense | pooled embedding of slot 1 | ... | of slot S ], float32[B, width].

    A slot may have a `dim` and `pooling` of its own; each width has its own table.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int,
        init_range: float,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        super().__init__()
        self._schema = schema
        checked = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        self.width = checked.width
        self._columns = checked.columns
        groups: dict[tuple[int, Pooling], list[str]] = {}
        for slot in schema.slots:
            own: dict[str, Any] = {"dim": dim, "pooling": pooling, **slots.get(slot, {})}
            groups.setdefault((own["dim"], own["pooling"]), []).append(slot)
        self.embeddings = nn.ModuleList(
            SlotEmbedding(
                None if len(groups) == 1 else names,
                dim=width,
                pooling=of_group,
                init_range=init_range,
                table="embedding" if width == dim else f"embedding_{width}",
            )
            for (width, of_group), names in groups.items()
        )
        grouped = [name for names in groups.values() for name in names]
        self._places = [grouped.index(slot) for slot in schema.slots]

    def forward(self, batch: Batch) -> Tensor:
        """Returns X."""
        if len(self.embeddings) == 1:
            return torch.cat([batch.dense, self.embeddings[0](batch).flatten(1)], dim=1)
        vectors = [each for embedding in self.embeddings for each in embedding(batch).unbind(1)]
        return torch.cat([batch.dense, *(vectors[place] for place in self._places)], dim=1)

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


def require_several(schema: Schema) -> None:
    """Raises ValueError unless the schema has two labels or more."""
    if not schema.other_labels:
        raise ValueError(
            "this model learns several labels, but the schema names none or one: set labels = "
            '["click", "conversion"] in it, for example'
        )
