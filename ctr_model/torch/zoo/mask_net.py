"""MaskNet: blocks whose inputs are multiplied by a mask of all features of the example.

Wang, She, Zhang, "MaskNet: introducing feature-wise multiplication to CTR ranking models by instance-guided
mask", DLP-KDD 2021, arXiv 2102.07619.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Fields, Mlp


class MaskNet(nn.Module):
    """Blocks i = 1, ..., n over the flat fields e, of widths `blocks`.

    mask_i = V_i relu(U_i e + c_i) + d_i       U_i has `reduction` times as many outputs as inputs
    block_i(x) = relu(LN(W_i (mask_i * x)))    (sections 3.2 and 3.3)

    "parallel": logit = MLP([block_1(x) | ... | block_n(x)]), where x = LN(e), field by field
    "serial": logit = w block_n(... block_1(x)) + b, without `hidden`
    """

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
        middle = max(1, round(reduction * width))
        self.masks = nn.ModuleList(Mlp(width, [middle], each) for each in inputs)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(*pair, bias=False),
                nn.LayerNorm(pair[1]),
                nn.ReLU(),
                nn.Dropout(dropout),
            )
            for pair in zip(inputs, blocks, strict=True)
        )
        self.head = (
            Mlp(blocks[-1], []) if self.is_serial else Mlp(sum(blocks), hidden, dropout=dropout)
        )

    logit_biases = ("head.out.bias",)

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
