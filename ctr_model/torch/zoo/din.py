"""DIN: attention of histories to the shown item (Zhou et al., KDD 2018, arXiv 1706.06978)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.histories import Inputs
from ctr_ps.ctr_model.torch.zoo.pooled import Perceptron, numbered


class Din(nn.Module):
    """Deep interest network: logit = MLP([dense | slot 1 | ... | slot S]).

    A history with the last keys h_1, ..., h_n and the pooled embedding t of its target has the vector

    u = a_1 h_1 + ... + a_n h_n,   a_j = 1 + MLP([h_j | t | h_j - t | h_j * t])     (equation 3)

    The weights are not normalized: three keys like the target give a larger u than one. The MLP starts near
    zero, so u starts as the sum of the rows. Layers have relu where the paper has PReLU or Dice.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        histories: Mapping[str, str] | None = None,
        attention_hidden: Sequence[int] = (36,),
        max_length: int = 50,
        dropout: float = 0.0,
    ) -> None:
        """Builds the network; `histories` maps a history to its target, by default `schema.shares`."""
        require_widths(hidden=hidden, attention_hidden=attention_hidden)
        inputs = Inputs(schema, dim, init_range, pooling, slots, histories, max_length)
        super().__init__()
        mlp = Perceptron((inputs.width, *hidden, 1), dropout)
        numbered(self, "fc", mlp.children())
        self.mlp = mlp
        self.inputs = inputs
        self.attention = nn.Module()
        self._attentions = {
            history: Perceptron((4 * inputs.dims[history], *attention_hidden, 1))
            for history in inputs.targets
        }
        # Not by add_module, which refuses some names of slots, such as "type" or one with a dot.
        self.attention._modules.update(self._attentions)
        self.logit_biases = (f"fc{len(hidden) + 1}.bias",)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        vectors = self.inputs.slots(batch)
        for history, target, rows, ages in self.inputs.histories(batch):
            t = vectors[target].unsqueeze(1).expand_as(rows)
            weights = 1 + self._attentions[history](torch.cat([rows, t, rows - t, rows * t], dim=2))
            vectors[history] = (weights * rows).masked_fill(ages.unsqueeze(2) < 0, 0.0).sum(1)
        logits: Tensor = self.mlp(self.inputs.concatenated(batch, vectors))
        return logits
