"""FinalMLP: two perceptrons over differently gated fields, whose outputs interact.

Mao et al., "FinalMLP: an enhanced two-stream MLP model for CTR prediction", AAAI 2023, arXiv 2304.00902.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp, hidden_layers


class FinalMlp(nn.Module):
    """Two streams k = 1, 2 over the flat fields e.

    h_k = 2 sigmoid(MLP(x_k)) * e              feature selection (equations 8 and 9)
    o_k = MLP_k(h_k)                           [B, H]
    logit = b + w_1 o_1 + w_2 o_2 + Σ_j o_1j' W_j o_2j   over `heads` parts o_kj of o_k (equation 13)

    x_k is the sum of other embeddings of the slots in `context1` or `context2`; without slots, a learned
    vector.
    """

    logit_biases = ("out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400),
        heads: int = 2,
        gate_hidden: Sequence[int] = (64,),
        context1: Sequence[str] = (),
        context2: Sequence[str] = (),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(hidden=hidden, heads=heads, gate_hidden=gate_hidden)
        if hidden[-1] % heads:
            raise ValueError(f"heads is {heads}, expected a divisor of hidden[-1], {hidden[-1]}")
        self.fields = Fields(schema, dim=dim, init_range=init_range, pooling=pooling)
        width = self.fields.count * dim
        self.gates = nn.ModuleList(
            _Gate(context, dim, gate_hidden, width, f"context{k}")
            for k, context in enumerate((context1, context2), start=1)
        )
        self.streams = nn.ModuleList(hidden_layers([width, *hidden], dropout) for _ in range(2))
        self.out = nn.Linear(2 * hidden[-1], 1)
        part = hidden[-1] // heads
        self.products = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, part, part)))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B]."""
        flat = self.fields(batch).flatten(1)
        first, second = (
            stream(2 * torch.sigmoid(gate(batch)) * flat)
            for gate, stream in zip(self.gates, self.streams, strict=True)
        )
        linear = self.out(torch.cat([first, second], dim=1)).squeeze(1)
        parts = (each.unflatten(1, self.products.shape[:2]) for each in (first, second))
        return linear + torch.einsum("bhi,hij,bhj->b", next(parts), self.products, next(parts))


class _Gate(nn.Module):
    def __init__(
        self, context: Sequence[str], dim: int, hidden: Sequence[int], outputs: int, table: str
    ) -> None:
        super().__init__()
        self.context = SlotEmbedding(context, dim=dim, table=table) if context else None
        if self.context is None:
            self.constant = nn.Parameter(torch.zeros(1, dim))
        self.mlp = Mlp(dim, hidden, outputs)

    def forward(self, batch: Batch) -> Tensor:
        """Returns float32[B, outputs], or float32[1, outputs] without context."""
        gate: Tensor = self.mlp(
            self.constant if self.context is None else self.context(batch).sum(1)
        )
        return gate
