"""A deep interest network as a module of PyTorch, trained by examples/torch_din.toml; see docs/models.md."""

import torch
from torch import Tensor, nn

from ctr_ps import Schema
from ctr_ps.torch import Batch, SlotEmbedding


class Din(nn.Module):
    """The built-in model `din`, for one history and its target."""

    def __init__(
        self,
        schema: Schema,
        *,
        target: str = "item",
        history: str = "history",
        dim: int = 8,
        hidden: int = 32,
        attention_hidden: int = 16,
    ) -> None:
        super().__init__()
        self.target = SlotEmbedding([target], dim=dim, init_range=0.1, table="items")
        self.history = SlotEmbedding(
            [history], dim=dim, init_range=0.1, table="items", pooling="none"
        )
        self.attention = nn.Sequential(
            nn.Linear(4 * dim, attention_hidden), nn.ReLU(), nn.Linear(attention_hidden, 1)
        )
        self.layers = nn.Sequential(
            nn.Linear(schema.num_dense + 2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits."""
        target = self.target(batch)  # [B, 1, D]
        rows, is_there = (each.squeeze(1) for each in self.history(batch))  # [B, T, D], [B, T]
        same = target.expand_as(rows)
        weights = 1 + self.attention(torch.cat([rows, same, rows - same, rows * same], dim=-1))
        interest = (weights * rows).masked_fill(~is_there.unsqueeze(-1), 0.0).sum(1)
        return self.layers(torch.cat([batch.dense, target.squeeze(1), interest], dim=1))
