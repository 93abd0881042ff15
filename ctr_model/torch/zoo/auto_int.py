"""AutoInt: self-attention between fields (Song et al., CIKM 2019, arXiv 1810.11921)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp


class AutoInt(nn.Module):
    """Layers of H heads over the fields e_1, ..., e_F.

    a_hmk = softmax over k of ⟨Q_h e_m, K_h e_k⟩                         (equation 5)
    e'_m = relu([Σ_k a_1mk V_1 e_k | ... | Σ_k a_Hmk V_H e_k] + R e_m)   (equations 6 to 8)
    logit = w [e'_1 | ... | e'_F] + b + MLP([e_1 | ... | e_F])           (section 4.6); the MLP if `hidden`
    """

    logit_biases = ("out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        layers: int = 3,
        heads: int = 2,
        head_dim: int = 16,
        hidden: Sequence[int] = (400, 400),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(layers=layers, heads=heads, head_dim=head_dim)
        self.fields = Fields(schema, dim=dim, init_range=init_range, pooling=pooling)
        width = heads * head_dim
        self.layers = nn.ModuleList(
            _Attention(inputs, heads, width) for inputs in [dim, *[width] * (layers - 1)]
        )
        self.out = nn.Linear(self.fields.count * width, 1)
        self.deep = Mlp(self.fields.count * dim, hidden, dropout=dropout) if hidden else None

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        x = fields = self.fields(batch)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x.flatten(1))
        return logits if self.deep is None else logits + self.deep(fields.flatten(1))


class _Attention(nn.Module):
    def __init__(self, inputs: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.residual = (
            nn.Linear(inputs, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32[B, F, H * D'] of float32[B, F, D]."""
        query, key, value = (
            each(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, H, F, D']
            for each in (self.query, self.key, self.value)
        )
        mixed = (query @ key.mT).softmax(3) @ value
        return torch.relu(mixed.transpose(1, 2).flatten(2) + self.residual(x))
