"""GDCN: a cross network whose products pass gates.

Wang et al., "Towards deeper, lighter and interpretable cross network for CTR prediction", CIKM 2023, arXiv
2311.04635.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp, hidden_layers


class Gdcn(nn.Module):
    """Gated cross layers over the flat fields c_0.

    c_(l+1) = c_0 * (W_l c_l + b_l) * sigmoid(V_l c_l) + c_l       (equation 2)

    "stacked": logit = MLP(c_L); "parallel": logit = w [c_L | MLP(c_0)] + b
    """

    logit_biases = ("head.out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        num_cross_layers: int = 3,
        structure: Literal["stacked", "parallel"] = "stacked",
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(num_cross_layers=num_cross_layers, hidden=hidden)
        self.fields = Fields(schema, dim=dim, init_range=init_range, pooling=pooling)
        width = self.fields.count * dim
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(num_cross_layers))
        self.gates = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(num_cross_layers)
        )
        self.deep = hidden_layers([width, *hidden], dropout) if structure == "parallel" else None
        self.head = (
            Mlp(width, hidden, dropout=dropout)
            if self.deep is None
            else Mlp(width + hidden[-1], [])
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        c = first = self.fields(batch).flatten(1)
        for cross, gate in zip(self.crosses, self.gates, strict=True):
            c = first * cross(c) * torch.sigmoid(gate(c)) + c
        logits: Tensor = self.head(
            c if self.deep is None else torch.cat([c, self.deep(first)], dim=1)
        )
        return logits
