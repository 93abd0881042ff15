"""Models of several labels, each with its network over what the labels share: ESMM, MMoE, PLE and PEPNet.

Ma, Zhao, Huang, Wang, Hu, Zhu and Gai, "Entire space multi-task model: an effective approach for estimating
post-click conversion rate", SIGIR 2018. The hidden layers are those of the paper.

Ma, Zhao, Yi, Chen, Hong and Chi, "Modeling task relationships in multi-task learning with multi-gate
mixture-of-experts", KDD 2018.

Tang, Liu, Zhao and Gong, "Progressive layered extraction (PLE): a novel multi-task learning (MTL) model for
personalized recommendations", RecSys 2020.

Chang et al., "PEPNet: parameter and embedding personalized network for infusing with personalized prior
information", KDD 2023, arXiv 2302.01115.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import (
    Mlp,
    Perceptron,
    PooledInput,
    Weight,
    hidden_layers,
    numbered,
)


class _OfLabels(nn.Module):
    """A module whose tasks are the labels, and its input X."""

    def __init__(
        self,
        schema: Schema,
        dim: int,
        init_range: float,
        pooling: Pooling,
        slots: Mapping[str, SlotOptions],
    ) -> None:
        super().__init__()
        if not schema.other_labels:
            raise ValueError(
                "this model learns several labels, but the schema names none or one: set labels = "
                '["click", "conversion"] in it, for example'
            )
        self.tasks = schema.labels
        self.input = PooledInput(schema, dim, init_range, pooling, slots)


class Mmoe(_OfLabels):
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
        super().__init__(schema, dim, init_range, pooling, slots)
        require_widths(num_experts=num_experts, expert=expert, tower=tower)
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


class Ple(_OfLabels):
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
        super().__init__(schema, dim, init_range, pooling, slots)
        require_widths(num_levels=num_levels, num_experts=num_experts, num_shared=num_shared)
        require_widths(expert=expert, tower=tower)
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


class PepNet(_OfLabels):
    """Labels k = 1, ..., K, of the pooled input X; ⊘ stops the gradient, [a, b] joins.

    U(x) = 2 sigmoid(relu(x W + b) W' + b')     a gate (equation 2)
    X'   = U([X of domain, ⊘ X]) * X            EPNet (equations 3 and 4); without `domain` X
    D_k  = U_k([X of prior, ⊘ X'])              PPNet: factors of all hidden values (equation 6)
    h    = D_kl * relu(h W_kl + b_kl)           for each hidden layer l, of h = X' first (equation 7)
    p_k  = sigmoid(h w_k + b_k)

    `domain` and `prior` are slots: of the scenario, and of the user and the item; no `prior`: all slots.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (128, 64),
        gate_hidden: int = 64,
        domain: Sequence[str] = (),
        prior: Sequence[str] = (),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        super().__init__(schema, dim, init_range, pooling, slots)
        require_widths(hidden=hidden, gate_hidden=gate_hidden)
        width, of_domain = self.input.width, self.input.columns(domain)
        of_prior = self.input.columns(prior or schema.slots)
        self.register_buffer("of_domain", of_domain, persistent=False)
        self.register_buffer("of_prior", of_prior, persistent=False)
        self.domain_gate = _Gate(len(of_domain) + width, gate_hidden, width) if domain else None
        self.gates = nn.ModuleList(
            _Gate(len(of_prior) + width, gate_hidden, sum(hidden)) for _ in self.tasks
        )
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(*pair) for pair in pairwise([width, *hidden]))
            for _ in self.tasks
        )
        self.outs = nn.ModuleList(nn.Linear(hidden[-1], 1) for _ in self.tasks)
        self.logit_biases = [f"outs.{k}.bias" for k in range(len(self.tasks))]
        self._hidden = tuple(hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, K]."""
        x = personal = self.input(batch)
        if self.domain_gate is not None:
            domain = x.index_select(1, self.of_domain)
            personal = self.domain_gate(torch.cat([domain, x.detach()], dim=1)) * x
        seen = torch.cat([x.index_select(1, self.of_prior), personal.detach()], dim=1)
        logits = []
        for gate_of, layers, out in zip(self.gates, self.layers, self.outs, strict=True):
            h = personal
            for layer, factors in zip(layers, gate_of(seen).split(self._hidden, 1), strict=True):
                h = factors * layer(h).relu()
            logits.append(out(h))
        return torch.cat(logits, dim=1)


class _Gate(nn.Sequential):
    """U, with values from 0 to 2."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32[B, outputs]."""
        return 2 * super().forward(x).sigmoid()


class Esmm(nn.Module):
    """Labels y (click) and c (conversion), of the pooled input X.

    p = sigmoid(M(X))             probability of a click                          pCTR
    q = sigmoid(N(X))             probability of a conversion, given a click      pCVR
    p q                           probability of both                             pCTCVR

    loss = log loss of y under p + log loss of y c under p q, over all rows       (equation 5)

    So pCVR learns from all rows, and predicts for all. M and N share the embeddings.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (360, 200, 80),
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
    ) -> None:
        super().__init__()
        require_widths(hidden=hidden)
        if len(schema.labels) != 2:
            raise ValueError(
                "ESMM learns two labels, the click and the conversion, but the schema names "
                f'{len(schema.labels)}: set labels = ["click", "conversion"] in it, for example'
            )
        click, conversion = schema.labels
        self.tasks = (
            Task(click, labels=(0,)),
            Task(conversion, labels=(1,), given=(0,)),
            Task(f"{click}_and_{conversion}", labels=(0, 1)),
        )
        self.input = PooledInput(schema, dim, init_range, pooling, slots)
        widths = [self.input.width, *hidden, 1]
        click_network, conversion_network = (Perceptron(widths, dropout) for _ in range(2))
        numbered(self, "ctr", click_network.children())
        numbered(self, "cvr", conversion_network.children())
        self.networks = nn.ModuleList([click_network, conversion_network])
        self.logit_biases = [f"{name}{len(hidden) + 1}.bias" for name in ("ctr", "cvr")]

    def forward(self, batch: Batch) -> Tensor:
        """Returns the logits of p and q, float32[B, 2]."""
        x = self.input(batch)
        return torch.cat([network(x) for network in self.networks], dim=1)

    def loss(self, batch: Batch, output: Tensor) -> Tensor:
        """Returns the two log losses, [B, 2], by sums of logarithms: no logit gives 0 / 0."""
        assert batch.labels is not None
        click, both = batch.labels[:, 0], batch.labels.prod(1)
        of_click, of_conversion = output.double().unbind(1)
        log_p, log_no_click = logsigmoid(of_click), logsigmoid(-of_click)
        log_both = log_p + logsigmoid(of_conversion)
        log_neither = torch.logaddexp(log_no_click, log_p + logsigmoid(-of_conversion))
        losses = [
            torch.where(click == 1, log_p, log_no_click),
            torch.where(both == 1, log_both, log_neither),
        ]
        return -torch.stack(losses, dim=1)

    def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
        """Returns p, q and p q, float32[B, 3]."""
        found = output.sigmoid()
        return torch.cat([found, found.prod(1, keepdim=True)], dim=1)
