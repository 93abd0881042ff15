"""Embeddings of slots, with rows in a table of the servers.

    X[b, s] = pooled rows[inverse[i]] over i from offsets[b * S + s] to offsets[b * S + s + 1], exclusive

Sums run through the kernels of the built-in models (ctr_model/layers/embedding.py), on a device through
PyTorch's operations; see `_sum`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ctr_ps.ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_ps.ctr_model.lookup import Lookup
from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch, Rows
from ctr_ps.ctr_model.torch.front import Front

Pooling = Literal["sum", "mean", "max", "none"]


class SlotEmbedding(Front):
    """Looks up the keys of slots in a table, and pools those of each slot.

    It has no parameters: the rows are on the servers, whose optimizers train them.
    """

    def __init__(
        self,
        slots: Sequence[str] | None = None,
        *,
        dim: int,
        pooling: Pooling = "sum",
        init_range: float = 0.01,
        crosses: Sequence[tuple[str, str]] = (),
        table: str | None = None,
        optimizer: Mapping[str, str | float] | None = None,
    ) -> None:
        """Declares a table, or a part of a table that several embeddings share.

        Args:
            slots: Slots to look up, by name; None: all of the schema.
            dim: D, width of the rows.
            pooling: "sum", "mean" or "max" of a slot's rows, zeros without any; "none": not pooled.
            init_range: New rows are uniform in [-init_range, init_range).
            crosses: Pairs of slots; each is one more slot, after these.
            table: Name of the table; None: the attribute that holds this module. Embeddings that name the
                same table share its rows, dim, range and optimizer.
            optimizer: Default optimizer of the table, as in a job; None: the job's.

        Raises:
            ValueError: If the width is less than 1, the range negative, or the pooling unknown.
        """
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}, expected at least 1")
        if not init_range >= 0:
            raise ValueError(f"init_range is {init_range}, expected a number >= 0")
        if pooling not in ("sum", "mean", "max", "none"):
            raise ValueError(f"pooling is {pooling!r}, expected sum, mean, max or none")
        self.slots = None if slots is None else tuple(slots)
        self.crosses = tuple((first, second) for first, second in crosses)
        self.dim = dim
        self.pooling = pooling
        self.init_range = init_range
        self.optimizer = optimizer
        self.table = table
        self._columns: list[int] | None = None  # of its slots among those of the table; None: all

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuses to freeze rows, which the servers' optimizers train."""
        if requires_grad:
            return self
        raise ValueError(
            f"{self!r} cannot be frozen: its rows are trained on the servers; `Embedding`, "
            f"in a loop of your own, can be"
        )

    def sources(self, schema: Schema) -> list[tuple[int, int]]:
        """Returns (slot number, -1) for each slot, then the crosses; ValueError for an unknown slot."""
        names = schema.slots if self.slots is None else self.slots
        plain = [(schema.slot_index(name), -1) for name in names]
        return plain + [(schema.slot_index(a), schema.slot_index(b)) for a, b in self.crosses]

    def take_part(self, table: str, columns: Sequence[int] | None) -> None:
        """Restricts the embedding to some of a table's slots, by position; None: all."""
        self.table = table
        self._columns = None if columns is None else list(columns)

    def forward(self, batch: Batch) -> Any:
        """Returns the embeddings of the slots, float32[B, S, D].

        With pooling "none": float32[B, S, T, D], padded with zeros to the largest number T of keys of a slot,
        and the mask bool[B, S, T].
        """
        if self.table is None or self.table not in batch.rows:
            raise ModelInputError(
                f"{self!r} is not part of the module: assign it to an attribute, or put it into an "
                f"nn.ModuleList or nn.ModuleDict"
            )
        rows = batch.rows[self.table]
        if self.pooling in ("max", "none"):
            padded, is_there = _padded(rows, batch.size, self._columns)
            return (padded, is_there) if self.pooling == "none" else _largest(padded, is_there)
        pooled = _sum(rows, batch.size)
        if self.pooling == "mean":
            counts = _counts(rows, batch.size)
            pooled = pooled / counts.clamp(min=1).unsqueeze(-1)
        return pooled if self._columns is None else pooled[:, self._columns]

    def extra_repr(self) -> str:
        """Returns what distinguishes this module, for `print`."""
        slots = "all slots" if self.slots is None else f"{len(self.slots)} slots"
        return f"{slots}, dim={self.dim}, pooling={self.pooling!r}, table={self.table!r}"


def _sum(rows: Rows, size: int) -> Tensor:
    if rows.lookup is not None:
        pooled: Tensor = _Sum.apply(rows.weights, rows.lookup, size)
        return pooled
    if not rows.inverse.numel():  # a batch without any key
        return rows.weights.new_zeros((size, rows.num_slots, rows.weights.shape[1]))
    sums = functional.embedding_bag(
        rows.inverse, rows.weights, rows.offsets, mode="sum", include_last_offset=True
    )
    return sums.view(size, rows.num_slots, -1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, lookup: Lookup, size: int) -> Tensor:
        ctx.lookup = lookup
        pooled = np.empty((size, lookup.num_slots * weights.shape[1]), np.float32)
        pool_slots(np.empty((size, 0), np.float32), lookup, pooled)
        return torch.from_numpy(pooled).view(size, lookup.num_slots, weights.shape[1])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0].reshape(len(grads[0]), -1).contiguous().numpy()
        out = np.empty_like(ctx.lookup.rows)
        scatter_slots(grad, ctx.lookup, out)
        return torch.from_numpy(out), None, None


def _counts(rows: Rows, size: int) -> Tensor:
    return rows.offsets.diff().view(size, rows.num_slots)


def _padded(rows: Rows, size: int, columns: list[int] | None) -> tuple[Tensor, Tensor]:
    """Returns the rows of each slot, float32[B, S, T, D] padded with zeros, and the mask bool[B, S, T].

    `columns` are the S slots among those of the table; None: all.
    """
    firsts, counts = rows.offsets[:-1].view(size, rows.num_slots), _counts(rows, size)
    if columns is not None:
        firsts, counts = firsts[:, columns], counts[:, columns]
    most = int(counts.max()) if counts.numel() else 0
    places = torch.arange(most, dtype=torch.int32, device=counts.device)
    there = places < counts.unsqueeze(-1)
    if not rows.inverse.numel():
        return rows.weights.new_zeros((*there.shape, rows.weights.shape[1])), there
    occurrences = torch.where(there, firsts.unsqueeze(-1) + places, 0)
    keys = rows.inverse.index_select(0, occurrences.view(-1))
    padded = rows.weights.index_select(0, keys).view(*there.shape, rows.weights.shape[1])
    # Not by a product: the row that stands behind may be infinite, and so may its gradient there.
    return padded.masked_fill(~there.unsqueeze(-1), 0.0), there


def _largest(padded: Tensor, is_there: Tensor) -> Tensor:
    """Returns the maximum over a slot's keys, float32[B, S, D]; zeros for a slot without keys."""
    if not padded.shape[2]:
        return padded.sum(2)
    largest = padded.masked_fill(~is_there.unsqueeze(-1), -torch.inf).amax(2)
    return largest.masked_fill(~is_there.any(2).unsqueeze(-1), 0.0)
