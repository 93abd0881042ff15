"""MMoE, the multi-gate mixture of experts: several labels, each with its own mixture of shared experts.

Ma, Zhao, Yi, Chen, Hong and Chi, "Modeling task relationships in multi-task learning with multi-gate
mixture-of-experts", KDD 2018.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.pooled import (
    Perceptron,
    PooledInput,
    Weight,
    numbered,
    require_several,
)


class Mmoe(nn.Module):
    """Labels k = 1, ..., K, of the pooled input X (equations 5 to 7).

    F_e = relu(M_e(X))                for each expert e = 1, ..., E   [B, H]
    G_k = softmax(X W_k)              the gate of label k             [B, E]
    p_k = sigmoid(T_k(Σ_e G_k[:, e] * F_e))                           [B]
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        num_experts: int = 8,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        super().__init__()
        require_widths(num_experts=num_experts, expert=expert, tower=tower)
        require_several(schema)
        self.tasks = schema.labels
        self.input = PooledInput(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
        )
        width, widths = self.input.width, [expert[-1], *tower, 1]
        experts = [Perceptron([width, *expert], dropout) for _ in range(num_experts)]
        gates = [Weight(width, num_experts, bias=False) for _ in self.tasks]
        towers = [Perceptron(widths, dropout) for _ in self.tasks]
        self.experts = numbered(self, "expert", experts)
        self.gates = numbered(self, "gate", gates)
        self.towers = numbered(self, "tower", towers)
        self.logit_biases = [f"tower{k + 1}.{len(tower) + 1}.bias" for k in range(len(towers))]

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, K]."""
        x = self.input(batch)
        experts = torch.stack([expert(x).relu() for expert in self.experts], dim=1)  # [B, E, H]
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            mixed = gate(x).softmax(1).unsqueeze(1) @ experts  # [B, 1, H]
            logits.append(tower(mixed.squeeze(1)))
        return torch.cat(logits, dim=1)
