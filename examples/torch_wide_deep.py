"""Wide & deep as a module of PyTorch, trained by examples/torch_wide_deep.toml; see docs/models.md."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ctr_ps import Schema
from ctr_ps.torch import Batch, SlotEmbedding


class WideDeep(nn.Module):
    """Logistic regression plus a multilayer perceptron: the built-in model `wide_deep`."""

    def __init__(self, schema: Schema, *, dim: int = 10, hidden: tuple[int, ...] = (400, 400, 400)):
        super().__init__()
        ftrl = {"name": "ftrl", "learning_rate": 0.1, "beta": 0.03, "l1": 0.01}
        self.wide = SlotEmbedding(dim=1, init_range=0.0, optimizer=ftrl)
        self.deep = SlotEmbedding(dim=dim, init_range=0.01)
        self.numbers = nn.Linear(schema.num_dense, 1)
        widths = [schema.num_dense + len(schema.slots) * dim, *hidden]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Returns the logits float32[B, 1]."""
        wide = self.numbers(batch.dense) + self.wide(batch).sum(1)
        return wide + self.mlp(torch.cat([batch.dense, self.deep(batch).flatten(1)], dim=1))
