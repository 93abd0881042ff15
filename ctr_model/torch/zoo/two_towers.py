"""Two towers: vectors of users and of items, whose product ranks items, for retrieval by nearest neighbours.

Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", RecSys 2019.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear, normalize

from ctr_ps.ctr_model.layers.pooling import Pooling, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.layers import Mlp, PooledInput


class TwoTowers(nn.Module):
    """Vectors of length 1: u of a row's user, v of its item.

    s_ij = u_i · v_j / temperature
    loss of a clicked row i = -log(exp(s_ii - q_i) / Σ_j exp(s_ij - q_j)),  j over the batch  (equation 3)

    So the items of all rows of the batch are the negatives. Frequent items are so more often: q_j is the
    logarithm of the item's share of the rows if the number `log_share` of the schema has it, else 0. The item
    has the slots `item`, the user the others and the numbers.

    Click probabilities are σ(|a| ⊘s_ii + b); a and b learn by the log loss, and ⊘ stops the gradient. |a|
    starts near 0, so with the base rate.
    """

    logit_biases = ("calibration.bias",)

    def __init__(
        self,
        schema: Schema,
        *,
        item: Sequence[str],
        dim: int = 32,
        hidden: Sequence[int] = (128,),
        vector: int = 32,
        temperature: float = 0.1,
        log_share: str = "",
        dropout: float = 0.0,
        init_range: float = 0.01,
        pooling: Pooling = "sum",
    ) -> None:
        super().__init__()
        require_widths(hidden=hidden, vector=vector)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, expected a number > 0")
        names = [column.name for column in schema.dense]
        if log_share and log_share not in names:
            raise ValueError(f"log_share is {log_share!r}, expected a number: {', '.join(names)}")
        self._share = names.index(log_share) if log_share else None
        share = schema.dense[self._share] if self._share is not None else None
        if share and ((share.transform, *share.span) != ("none", 0, 1) or share.missing >= 0):
            raise ValueError(
                f"log_share is {log_share!r}, with transform {share.transform!r}, shift {share.shift}, scale "
                f"{share.scale} and missing {share.missing}, expected 'none', 0, 1 and one < 0, as -12.0"
            )
        self._temperature = temperature
        self.input = PooledInput(schema, dim, init_range, pooling)
        user = self.input.columns([slot for slot in schema.slots if slot not in item])
        numbers = [place for place in range(schema.num_dense) if place != self._share]
        of_user = torch.cat([torch.tensor(numbers, dtype=torch.int64), user])
        of_item = self.input.columns(item)
        if not len(of_user) or not len(of_item):
            raise ValueError(f"item is {item!r}, expected some slots of the schema, not all")
        self.register_buffer("of_user", of_user, persistent=False)
        self.register_buffer("of_item", of_item, persistent=False)
        self.calibration = nn.Linear(1, 1)
        nn.init.constant_(self.calibration.weight, 0.1 * temperature)
        nn.init.zeros_(self.calibration.bias)
        self.user = Mlp(len(of_user), hidden, vector, dropout=dropout)
        self.item = Mlp(len(of_item), hidden, vector, dropout=dropout)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the vectors, each float32[B, `vector`]."""
        x = self.input(batch)
        user = self.user(x.index_select(1, self.of_user))
        item = self.item(x.index_select(1, self.of_item))
        return {"user": normalize(user), "item": normalize(item)}

    def loss(self, batch: Batch, output: dict[str, Tensor]) -> Tensor:
        """Returns both losses of each row; the first is 0 without a click."""
        assert batch.labels is not None
        scores = output["user"] @ output["item"].t() / self._temperature
        if self._share is not None:
            scores = scores - batch.dense[:, self._share]
        of_click = binary_cross_entropy_with_logits(
            self._logits(output), batch.labels, reduction="none"
        )
        return of_click - scores.log_softmax(dim=1).diagonal() * batch.labels

    def probabilities(self, batch: Batch, output: dict[str, Tensor]) -> Tensor:
        """Returns click probabilities float32[B]."""
        return self._logits(output).sigmoid()

    def _logits(self, output: dict[str, Tensor]) -> Tensor:
        scores = (output["user"] * output["item"]).sum(1, keepdim=True) / self._temperature
        weight, bias = self.calibration.weight, self.calibration.bias
        return linear(scores.detach(), weight.abs(), bias).squeeze(1)
