"""Networks over features that are vectors of one width, or gated by networks of all of them."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp, hidden_layers


class AutoInt(nn.Module):
    """AutoInt: layers of H heads over the fields e_1, ..., e_F (Song et al., CIKM 2019, arXiv 1810.11921).

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


class Wukong(nn.Module):
    """Wukong: layers over F fields X [F, D]; then logit = MLP(flat X) (Zhang et al., ICML 2024).

    next X = LN([FMB(X) | LCB(X)] + R X)   n + m fields; R is 1 where there were as many (section 3.4)
    FMB(X) = MLP(LN(flat X X' Y))          n = `fm_fields`; Y [F, rank] (sections 3.5 and 3.6)
    LCB(X) = W X                           m = `linear_fields` (section 3.7)

    Numbers are fields as in `Fields`, where the paper, arXiv 2403.02545, has an MLP.
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


class FinalMlp(nn.Module):
    """FinalMLP: two streams k = 1, 2 over the flat fields e, each with a gate (arXiv 2304.00902).

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
        width, part = self.fields.count * dim, hidden[-1] // heads
        own = partial(SlotEmbedding, dim=dim, init_range=init_range, pooling=pooling)
        self.gates = nn.ModuleList(
            _Gate(own(context, table=f"context{k}") if context else None, dim, gate_hidden, width)
            for k, context in enumerate((context1, context2), start=1)
        )
        self.streams = nn.ModuleList(hidden_layers([width, *hidden], dropout) for _ in range(2))
        self.out = nn.Linear(2 * hidden[-1], 1)
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
        self, context: SlotEmbedding | None, dim: int, hidden: Sequence[int], outputs: int
    ) -> None:
        super().__init__()
        self.context = context
        if self.context is None:
            self.constant = nn.Parameter(torch.zeros(1, dim))
        self.mlp = Mlp(dim, hidden, outputs)

    def forward(self, batch: Batch) -> Tensor:
        x = self.constant if self.context is None else self.context(batch).sum(1)
        gate: Tensor = self.mlp(x)  # of one row without context
        return gate


class MaskNet(nn.Module):
    """MaskNet: blocks i = 1, ..., n over the flat fields e, of widths `blocks` (arXiv 2102.07619).

    mask_i = V_i relu(U_i e + c_i) + d_i       U_i has `reduction` times as many outputs as inputs
    block_i(x) = relu(LN(W_i (mask_i * x)))    (sections 3.2 and 3.3)

    "parallel": logit = MLP([block_1(x) | ... | block_n(x)]), where x = LN(e), field by field
    "serial": logit = w block_n(... block_1(x)) + b, without `hidden`
    """

    logit_biases = ("head.out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        blocks: Sequence[int] = (64, 64, 64),
        structure: Literal["parallel", "serial"] = "parallel",
        hidden: Sequence[int] = (400, 400),
        reduction: float = 1.0,
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(blocks=blocks, hidden=hidden)
        if not reduction > 0:
            raise ValueError(f"reduction is {reduction}, expected a number > 0")
        self.fields = Fields(schema, dim=dim, init_range=init_range, pooling=pooling)
        self.is_serial = structure == "serial"
        self.norm = nn.LayerNorm(dim)
        width = self.fields.count * dim
        inputs = [width, *blocks[:-1]] if self.is_serial else [width] * len(blocks)
        self.masks = nn.ModuleList(
            Mlp(width, [max(1, round(reduction * width))], each) for each in inputs
        )
        self.blocks = nn.ModuleList()
        for pair in zip(inputs, blocks, strict=True):
            layers = nn.Linear(*pair, bias=False), nn.LayerNorm(pair[1]), nn.ReLU()
            self.blocks.append(nn.Sequential(*layers, nn.Dropout(dropout)))
        in_head = (blocks[-1], []) if self.is_serial else (sum(blocks), hidden)
        self.head = Mlp(*in_head, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        fields = self.fields(batch)
        flat, x = fields.flatten(1), self.norm(fields).flatten(1)
        outputs = []
        for mask, block in zip(self.masks, self.blocks, strict=True):
            outputs.append(block(mask(flat) * x))
            x = outputs[-1] if self.is_serial else x
        logits: Tensor = self.head(x if self.is_serial else torch.cat(outputs, dim=1))
        return logits


class Gdcn(nn.Module):
    """GDCN: cross layers over the flat fields c_0, whose products pass gates (arXiv 2311.04635).

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
        layers = range(num_cross_layers)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in layers)
        self.gates = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in layers)
        self.deep = hidden_layers([width, *hidden], dropout) if structure == "parallel" else None
        in_head = (width, hidden) if self.deep is None else (width + hidden[-1], [])
        self.head = Mlp(*in_head, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        c = first = self.fields(batch).flatten(1)
        for cross, gate in zip(self.crosses, self.gates, strict=True):
            c = first * cross(c) * torch.sigmoid(gate(c)) + c
        c = c if self.deep is None else torch.cat([c, self.deep(first)], dim=1)
        logits: Tensor = self.head(c)
        return logits
