"""Attention among the features of an example, as a module of PyTorch: the dense part is most of the work.

ps-launch --server-num 2 --worker-num 2 --heter-num 1 examples/torch_attention.toml
"""

import torch
from torch import Tensor, nn

from ctr_ps import Schema
from ctr_ps.torch import Batch, SlotEmbedding


class Attention(nn.Module):
    """The rows of all slots look at each other, and what they see is averaged."""

    def __init__(self, schema: Schema, *, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.rows = SlotEmbedding(dim=dim, init_range=0.1, pooling="none")
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.layers = nn.Sequential(
            nn.Linear(schema.num_dense + dim, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits."""
        rows, is_there = (each.flatten(1, 2) for each in self.rows(batch))
        ignored = torch.zeros_like(rows[..., 0]).masked_fill(~is_there, -1e4)
        seen, _ = self.attention(rows, rows, rows, key_padding_mask=ignored, need_weights=False)
        count = is_there.sum(1, keepdim=True).clamp(min=1)
        mean = seen.masked_fill(~is_there.unsqueeze(-1), 0.0).sum(1) / count
        return self.layers(torch.cat([batch.dense, mean], dim=1))
