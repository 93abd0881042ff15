"""PEPNet, parameter and embedding personalized network: gates by scenario and by user, for several labels.

Chang et al., "PEPNet: parameter and embedding personalized network for infusing with personalized prior
information", KDD 2023, arXiv 2302.01115.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.pooled import PooledInput, require_several


class PepNet(nn.Module):
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
        super().__init__()
        require_widths(hidden=hidden, gate_hidden=gate_hidden)
        require_several(schema)
        self.tasks = schema.labels
        self.input = PooledInput(
            schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots
        )
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
