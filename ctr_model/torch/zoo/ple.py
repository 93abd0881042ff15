"""PLE, progressive layered extraction: several labels with experts of their own beside shared ones.

Tang, Liu, Zhao and Gong, "Progressive layered extraction (PLE): a novel multi-task learning (MTL) model for
personalized recommendations", RecSys 2020.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Mlp, hidden_layers
from ctr_ps.ctr_model.torch.zoo.pooled import PooledInput, require_several


class Ple(nn.Module):
    """Labels k = 1, ..., K, of the pooled input X; at k = 0 what they share (equations 5 to 8).

    g_k,0 = X
    S_k,j = experts k and 0 of level j, of g_k,j-1 and g_0,j-1; for k = 0 all experts     [B, E, H]
    g_k,j = softmax(g_k,j-1 W_k,j) S_k,j                                                  [B, H]
    p_k   = sigmoid(T_k(g_k,N))

    There are `num_levels` N; one level is the model CGC of the paper.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        num_levels: int = 1,
        num_experts: int = 2,
        num_shared: int = 2,
        expert: Sequence[int] = (128,),
        tower: Sequence[int] = (64,),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        super().__init__()
        require_widths(num_levels=num_levels, num_experts=num_experts, num_shared=num_shared)
        require_widths(expert=expert, tower=tower)
        require_several(schema)
        self.tasks = schema.labels
        self.input = PooledInput(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
        )
        counts = [num_shared] + [num_experts] * len(self.tasks)
        widths = [self.input.width] + [expert[-1]] * (num_levels - 1)
        self.levels = nn.ModuleList(
            _Level([width, *expert], counts, dropout, is_last=number == num_levels)
            for number, width in enumerate(widths, start=1)
        )
        self.towers = nn.ModuleList(Mlp(expert[-1], tower, dropout=dropout) for _ in self.tasks)
        self.logit_biases = [f"towers.{k}.out.bias" for k in range(len(self.tasks))]

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, K]."""
        states = [self.input(batch)] * (1 + len(self.tasks))
        for level in self.levels:
            states = level(states)
        logits = [tower(of) for tower, of in zip(self.towers, states[1:], strict=True)]
        return torch.cat(logits, dim=1)


class _Level(nn.Module):
    """Experts by group, the shared ones first, and the gates; the last level needs no shared gate."""

    def __init__(
        self, widths: Sequence[int], counts: Sequence[int], dropout: float, *, is_last: bool
    ) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.ModuleList(hidden_layers(widths, dropout) for _ in range(count)) for count in counts
        )
        outputs = [sum(counts), *(counts[0] + count for count in counts[1:])]
        self.gates = nn.ModuleList(
            nn.Linear(widths[0], each, bias=False) for each in outputs[is_last:]
        )
        self._is_last = is_last

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Returns g_0,j (of the last level the old one), ..., g_K,j, of those of the level before."""
        found = [
            torch.stack([expert(state) for expert in group], dim=1)  # [B, count, H]
            for group, state in zip(self.groups, states, strict=True)
        ]
        seen = [torch.cat(found, dim=1), *(torch.cat([own, found[0]], 1) for own in found[1:])]
        first = int(self._is_last)
        mixed = [
            (gate(state).softmax(1).unsqueeze(1) @ experts).squeeze(1)
            for gate, state, experts in zip(self.gates, states[first:], seen[first:], strict=True)
        ]
        return [*states[:first], *mixed]
