"""BST: a transformer over a history and the shown item (Chen et al., DLP-KDD 2019, arXiv 1905.06874)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.histories import Inputs
from ctr_ps.ctr_model.torch.zoo.layers import Mlp


class Bst(nn.Module):
    """Behavior sequence transformer: logit = MLP([dense | slot 1 | ... | slot S]).

    A history with the last keys h_1, ..., h_n, of ages n - 1 to 0, and the target t has the vector of t in
    the last of `layers` layers:

    Z = [h_1 + p_(n - 1) | ... | h_n + p_0 | t + q]          p: learned for each age, in place of a time
    S = LN(Z + MultiHead(Z)),   Z' = LN(S + W_2 leaky_relu(W_1 S + b_1) + b_2)      (equations 4 and 5)

    The paper flattens Z', whose length is fixed there.
    """

    logit_biases = ("mlp.out.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400),
        layers: int = 1,
        heads: int = 2,
        feed_forward: int = 64,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
        slots: Mapping[str, SlotOptions] = {},
        histories: Mapping[str, str] | None = None,
        max_length: int = 50,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require_widths(hidden=hidden, layers=layers, heads=heads, feed_forward=feed_forward)
        self.inputs = Inputs(schema, dim, init_range, pooling, slots, histories, max_length)
        self.transformers = nn.ModuleList()
        self.positions = nn.ParameterList()
        for history in self.inputs.targets:
            width = self.inputs.dims[history]
            if width % heads:
                raise ValueError(f"heads is {heads}, expected a divisor of dim, {width}")
            sizes = width, heads, feed_forward, dropout, functional.leaky_relu
            of_history = [
                nn.TransformerEncoderLayer(*sizes, batch_first=True) for _ in range(layers)
            ]
            self.transformers.append(nn.ModuleList(of_history))
            # The last row is q, of the target.
            self.positions.append(nn.Parameter(init_range * torch.randn(max_length + 1, width)))
        self.mlp = Mlp(self.inputs.width, hidden, dropout=dropout)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        vectors = self.inputs.slots(batch)
        histories = self.inputs.histories(batch)
        each = zip(histories, self.positions, self.transformers, strict=True)
        for (history, target, rows, of_rows), positions, transformer in each:
            ages = functional.pad(of_rows, (0, 1), value=len(positions) - 1)
            z = torch.cat([rows, vectors[target].unsqueeze(1)], dim=1)  # [B, T + 1, D]
            z = z + positions[ages.clamp(min=0)]
            for layer in transformer:
                z = layer(z, src_key_padding_mask=ages < 0)
            vectors[history] = z[:, -1]
        logits: Tensor = self.mlp(self.inputs.concatenated(batch, vectors))
        return logits
