"""ESMM, the entire space multi-task model: clicks, and the conversions after them.

Ma, Zhao, Huang, Wang, Hu, Zhu and Gai, "Entire space multi-task model: an effective approach for estimating
post-click conversion rate", SIGIR 2018. The hidden layers are those of the paper.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.models.model import Task
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.pooled import Perceptron, PooledInput, numbered


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
