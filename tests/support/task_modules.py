"""A module of several tasks, which jobs of tests name by its file."""

import torch
from torch import Tensor, nn

from ctr_ps import Schema
from ctr_ps.torch import Batch, SlotEmbedding


class SharedBottom(nn.Module):
    """One hidden layer that all labels share, and a logit of each."""

    def __init__(self, schema: Schema, *, dim: int = 2, hidden: int = 5) -> None:
        super().__init__()
        self.tasks = schema.labels
        self.embedding = SlotEmbedding(dim=dim, init_range=0.1)
        self.bottom = nn.Linear(schema.num_dense + len(schema.slots) * dim, hidden)
        self.heads = nn.Linear(hidden, len(schema.labels))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, T]."""
        x = torch.cat([batch.dense, self.embedding(batch).flatten(1)], dim=1)
        return self.heads(self.bottom(x).relu())
