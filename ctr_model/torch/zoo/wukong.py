"""Wukong: stacked factorization machines (Zhang et al., ICML 2024, arXiv 2403.02545)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp


class Wukong(nn.Module):
    """Layers over F fields X [F, D]; then logit = MLP(flat X).

    next X = LN([FMB(X) | LCB(X)] + R X)   n + m fields; R is 1 where there were as many (section 3.4)
    FMB(X) = MLP(LN(flat X X' Y))          n = `fm_fields`; Y [F, rank] (sections 3.5 and 3.6)
    LCB(X) = W X                           m = `linear_fields` (section 3.7)

    Numbers are fields as in `Fields`, where the paper has an MLP.
    """

    logit_biases = ("head.out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        layers: int = 2,
        fm_fields: int = 16,
        linear_fields: int = 16,
        rank: int = 8,
        fm_hidden: Sequence[int] = (128,),
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(layers=layers, fm_fields=fm_fields, linear_fields=linear_fields, rank=rank)
        require_widths(fm_hidden=fm_hidden, hidden=hidden)
        self.fields = Fields(schema, dim=dim, init_range=init_range, pooling=pooling)
        out = fm_fields + linear_fields
        self.layers = nn.ModuleList(
            _Layer(count, dim, fm_fields, linear_fields, rank, fm_hidden, dropout)
            for count in [self.fields.count, *[out] * (layers - 1)]
        )
        self.head = Mlp(out * dim, hidden, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        x = self.fields(batch)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class _Layer(nn.Module):
    def __init__(
        self, count: int, dim: int, n: int, m: int, rank: int, hidden: Sequence[int], dropout: float
    ) -> None:
        super().__init__()
        self.project = nn.Linear(count, rank, bias=False)
        mlp = Mlp(count * rank, hidden, n * dim, dropout=dropout)
        self.interact = nn.Sequential(nn.LayerNorm(count * rank), mlp)
        self.compress = nn.Linear(count, m, bias=False)
        same = count == n + m
        self.residual = nn.Identity() if same else nn.Linear(count, n + m, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the next fields float32[B, n + m, D] of float32[B, F, D]."""
        by_column = x.mT  # [B, D, F]
        products = x @ self.project(by_column)  # [B, F, rank]
        interacted = self.interact(products.flatten(1)).unflatten(1, (-1, x.shape[2]))
        new = torch.cat([interacted, self.compress(by_column).mT], dim=1)
        normed: Tensor = self.norm(new + self.residual(by_column).mT)
        return normed
