"""Embeddings on tables and their twins of torch.nn, with the same rows as a weight."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ctr_ps.ps_worker.torch import Embedding, EmbeddingBag, PushOptimizer, Tables, open_tables
from tests.support.cluster import cluster
from tests.support.training import together

torch.set_num_threads(
    1
)  # workers are threads here: PyTorch's own of each would wait for each other

NUM_KEYS = 12
DIM = 3


@dataclass(frozen=True)
class LookUp:
    """A look-up: in bags with offsets or keys of two dimensions, else key by key."""

    mode: str
    keys: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None

    def of(self, module: nn.Module) -> Tensor:
        if self.mode == "none":
            return module(self.keys)
        return module(self.keys, self.offsets, self.weights)


class OnTable(nn.Module):
    """A module for each mode, on one table."""

    def __init__(self, table: str = "items", dim: int = DIM, optimizer: object = None) -> None:
        super().__init__()
        options = {"table": table, "init_range": 0.5, "optimizer": optimizer}
        self.by_mode = nn.ModuleDict(
            {
                "none": Embedding(dim, **options),
                "sum": EmbeddingBag(dim, mode="sum", **options),
                "mean": EmbeddingBag(dim, mode="mean", **options),
                "max": EmbeddingBag(dim, mode="max", **options),
            }
        )

    def forward(self, lookup: LookUp) -> Tensor:
        return lookup.of(self.by_mode[lookup.mode])

    def weight(self) -> Tensor:
        """The rows of all keys, as in training."""
        with torch.no_grad():
            return self.by_mode["none"](torch.arange(NUM_KEYS))


class OnWeight(nn.Module):
    """The same modules of torch.nn, on one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        size = weight.shape
        self.by_mode = nn.ModuleDict(
            {
                "none": nn.Embedding(*size),
                "sum": nn.EmbeddingBag(*size, mode="sum"),
                "mean": nn.EmbeddingBag(*size, mode="mean"),
                "max": nn.EmbeddingBag(*size, mode="max"),
            }
        )
        for module in self.by_mode.values():
            module.weight = self.weight

    def forward(self, lookup: LookUp) -> Tensor:
        return lookup.of(self.by_mode[lookup.mode])


def dense_gradient(tables: Tables, dim: int = DIM) -> np.ndarray:
    """Returns the pending gradient of each key, float32[NUM_KEYS, dim]."""
    dense = np.zeros((NUM_KEYS, dim), np.float32)
    for grad in tables.pending.merged().values():
        dense[grad.keys.astype(np.int64)] = grad.values
    return dense


def coefficients(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """A bag of items and one of words, and a dense part."""

    def __init__(self, optimizer: object = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.items = EmbeddingBag(DIM, table="items", init_range=0.5, optimizer=optimizer)
        self.words = Embedding(2, table="words", init_range=0.5, optimizer=optimizer)
        self.linear = nn.Linear(DIM + 2, 1)

    def forward(self, batch: "NetBatch") -> Tensor:
        pooled = self.items(batch.items, batch.offsets)
        return self.linear(torch.cat([pooled, self.words(batch.words)], 1)).squeeze(1)

    def loss(self, batch: "NetBatch") -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch.labels)


@dataclass(frozen=True)
class NetBatch:
    items: Tensor
    offsets: Tensor
    words: Tensor
    labels: Tensor

    def keys(self) -> dict[str, Tensor]:
        return {"items": self.items, "words": self.words}


def net_batches(number: int, seed: int, size: int = 8) -> list[NetBatch]:
    random = torch.Generator().manual_seed(seed)

    def batch() -> NetBatch:
        return NetBatch(
            items=torch.randint(NUM_KEYS, (3 * size,), generator=random),
            offsets=torch.arange(0, 3 * size, 3),
            words=torch.randint(NUM_KEYS, (size,), generator=random),
            labels=torch.randint(2, (size,), generator=random).float(),
        )

    return [batch() for _ in range(number)]


def joined_batch(first: NetBatch, second: NetBatch) -> NetBatch:
    return NetBatch(
        items=torch.cat([first.items, second.items]),
        offsets=torch.cat([first.offsets, second.offsets + first.items.numel()]),
        words=torch.cat([first.words, second.words]),
        labels=torch.cat([first.labels, second.labels]),
    )


def train_net(tables: Tables, net: Net, batches: Iterable[NetBatch]) -> list[float]:
    """Trains a step on each batch; returns the losses."""
    rows, dense = PushOptimizer(tables), torch.optim.SGD(net.linear.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        rows.zero_grad()
        dense.zero_grad()
        loss = net.loss(batch)
        loss.backward()
        rows.step()
        dense.step()
        losses.append(loss.item())
    return losses


def rows_of(net: Net) -> list[Tensor]:
    """Returns all rows of both tables, as in training, and the dense parameters."""
    keys = torch.arange(NUM_KEYS)
    with torch.no_grad():
        return [net.items(keys[:, None]), net.words(keys), *net.linear.parameters()]


def on_cluster(
    work: Callable[[Tables], object],
    *,
    num_servers: int = 1,
    num_workers: int = 2,
    mode: str = "sync",
    modes: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Runs workers in threads, each with tables of its own; `modes` if they differ.

    `settings` are those of `open_tables`.
    """
    with cluster(num_servers=num_servers, num_workers=num_workers) as servers:

        def worker(index: int) -> None:
            with open_tables(
                servers=servers.endpoints,
                worker=index,
                num_workers=num_workers,
                mode=modes[index] if modes else mode,
                **settings,
            ) as tables:
                work(tables)

        together(*(partial(worker, index) for index in range(num_workers)))
