"""Wide & deep as a module of PyTorch: the same model as `wide_deep`, with autograd's gradients.

Trained by examples/torch_wide_deep.toml; docs/models.md says what a module may do.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ctr_model.schema import Schema
from ctr_model.torch import Batch, Embedding


class WideDeep(nn.Module):
    """Logistic regression plus a multilayer perceptron."""

    def __init__(
        self, schema: Schema, *, dim: int = 10, hidden: Sequence[int] = (400, 400, 400)
    ) -> None:
        """Declares embeddings and layers for the columns of a schema."""
        super().__init__()
        ftrl = {"name": "ftrl", "learning_rate": 0.1, "beta": 0.03, "l1": 0.01}
        self.wide = Embedding(dim=1, optimizer=ftrl)
        self.deep = Embedding(dim=dim, init_range=0.01)
        self.wide_numbers = nn.Linear(schema.num_dense, 1)
        widths = [schema.num_dense + len(schema.slots) * dim, *hidden]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> Tensor:
        """Returns the logits float32[B, 1]."""
        wide = self.wide_numbers(batch.dense) + self.wide(batch).sum(dim=1)
        return wide + self.mlp(torch.cat([batch.dense, self.deep(batch).flatten(1)], dim=1))
