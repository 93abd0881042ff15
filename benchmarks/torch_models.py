"""CTR-DNN as a module of PyTorch, for benchmarks: the network of `ctr_model/models/ctr_dnn.py`."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch import Batch, SlotEmbedding


def perceptron(widths: Sequence[int]) -> nn.Sequential:
    """Returns fully connected layers with relu between them."""
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class CtrDnn(nn.Module):
    """CTR-DNN: two logits, no click and click."""

    def __init__(
        self, schema: Schema, *, dim: int = 10, hidden: Sequence[int] = (400, 400, 400)
    ) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=dim, init_range=0.01)
        self.mlp = perceptron([schema.num_dense + len(schema.slots) * dim, *hidden, 2])

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits, float32[B, 2]."""
        return self.mlp(torch.cat([batch.dense, self.embedding(batch).flatten(1)], dim=1))

    def loss(self, batch: Batch, output: Tensor) -> Tensor:
        """Returns the cross entropy of each example, float32[B]."""
        assert batch.labels is not None
        return functional.cross_entropy(output, batch.labels.long(), reduction="none")

    def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
        """Returns the probability of a click, float32[B]."""
        return output.softmax(1)[:, 1]
