"""Twins of the built-in models as modules of PyTorch: parameters in the same order, weights transposed."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.parameters import FlatLayout, Floats
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch import Batch, Front, SlotEmbedding


def mlp(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def pooled(batch: Batch, embedding: SlotEmbedding) -> Tensor:
    return torch.cat([batch.dense, embedding(batch).flatten(1)], dim=1)


def width(schema: Schema, dim: int) -> int:
    return schema.num_dense + len(schema.slots) * dim


class CtrDnn(nn.Module):
    """With two logits, and so its own loss."""

    def __init__(self, schema: Schema, *, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=dim, init_range=0.01)
        self.mlp = mlp([width(schema, dim), *hidden, 2])

    def forward(self, batch: Batch) -> Tensor:
        return self.mlp(pooled(batch, self.embedding))

    def loss(self, batch: Batch, output: Tensor) -> Tensor:
        assert batch.labels is not None
        return functional.cross_entropy(output.float(), batch.labels.long())

    def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
        return output.float().softmax(1)[:, 1]


class WideDeep(nn.Module):
    def __init__(
        self,
        schema: Schema,
        *,
        dim: int,
        hidden: list[int],
        crosses: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__()
        ftrl = {"name": "ftrl", "learning_rate": 0.1, "beta": 0.03, "l1": 0.01}
        self.wide = SlotEmbedding(dim=1, init_range=0.0, crosses=crosses, optimizer=ftrl)
        self.embedding = SlotEmbedding(dim=dim, init_range=0.01)
        self.numbers = nn.Linear(schema.num_dense, 1)
        self.mlp = mlp([width(schema, dim), *hidden, 1])

    def forward(self, batch: Batch) -> Tensor:
        wide = self.numbers(batch.dense) + self.wide(batch).sum(1)
        return wide + self.mlp(pooled(batch, self.embedding))


class DeepFm(nn.Module):
    def __init__(self, schema: Schema, *, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.linear = SlotEmbedding(dim=1, init_range=0.0)
        self.embedding = SlotEmbedding(dim=dim, init_range=0.01, table="embedding")
        self.apart = SlotEmbedding(dim=dim, init_range=0.01, table="embedding", pooling="none")
        self.numbers = nn.Linear(schema.num_dense, 1)
        self.mlp = mlp([width(schema, dim), *hidden, 1])

    def forward(self, batch: Batch) -> Tensor:
        sums = self.embedding(batch).sum(1)
        squares = self.apart(batch)[0].square().sum((1, 2))
        pairs = 0.5 * (sums.square() - squares).sum(1, keepdim=True)
        first_order = self.numbers(batch.dense) + self.linear(batch).sum(1)
        return first_order + pairs + self.mlp(pooled(batch, self.embedding))


class DcnV2(nn.Module):
    def __init__(self, schema: Schema, *, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=dim, init_range=0.01)
        n = width(schema, dim)
        self.cross = nn.ModuleList([nn.Linear(n, n), nn.Linear(n, n)])
        self.mlp = mlp([n, *hidden, 1])

    def forward(self, batch: Batch) -> Tensor:
        first = x = pooled(batch, self.embedding)
        for layer in self.cross:
            x = first * layer(x) + x
        return self.mlp(x)


class Products(Front):
    """Has a matrix product, which autocast rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=4, init_range=0.3)

    def forward(self, batch: Batch) -> Tensor:
        found = self.embedding(batch)
        return torch.bmm(found, found.transpose(1, 2)).flatten(1)


class SlotProducts(nn.Module):
    """A cut behind the products of all pairs of slots."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.products = Products()
        self.layer = nn.Linear(len(schema.slots) ** 2, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(self.products(batch))


class Attention(nn.Module):
    """The rows of slots stay apart, and their number differs from batch to batch."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=4, init_range=0.1, pooling="none")
        self.query = nn.Parameter(torch.full((4,), 0.5))
        self.layer = nn.Linear(4, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows, is_there = self.embedding(batch)
        scores = (rows * self.query).sum(-1).masked_fill(~is_there, -30.0)
        return self.layer((scores.softmax(-1).unsqueeze(-1) * rows).sum((1, 2)))


TWINS: dict[str, Any] = {
    "ctr_dnn": CtrDnn,
    "wide_deep": WideDeep,
    "deepfm": DeepFm,
    "dcn_v2": DcnV2,
}


def params_of_twin(twin: Model, original: Model, params: Floats) -> Floats:
    """Converts a built-in model's flat vector to the twin's."""
    return np.concatenate(
        [
            view.reshape(shape.shape[::-1]).T.reshape(-1) if len(shape.shape) > 1 else view
            for view, shape in zip(
                FlatLayout(original.segments).views(params), twin.segments, strict=True
            )
        ]
    )
