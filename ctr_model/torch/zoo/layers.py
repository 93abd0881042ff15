"""Layers that several models have: fields of one width, and fully connected layers."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling
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
