"""Embeddings of slots, with rows in a table of the servers, and the cut of a module before which they run.

    X[b, s] = pooled rows[inverse[i]] over i from offsets[b * S + s] to offsets[b * S + s + 1], exclusive

Sums run through the kernels of the built-in models (ctr_model/layers/pooling.py), on a device through
PyTorch's operations; see `_sum`.

    batch, rows --fronts--> their outputs | the rest of the module --> loss

Layers before the cut run beside the rows, the rest may run elsewhere. Embeddings are fronts. So is a user's
class that derives from `Front`: its output then crosses the cut in place of that of the embeddings inside it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ctr_ps.ctr_model.layers.pooling import pool_slots, require_range, require_widths, scatter_slots
from ctr_ps.ctr_model.parameters import EmbeddingTable, Lookup, ModelInputError
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch, Rows


class Front(nn.Module):
    """A layer before the cut: called with the batch only, without dense parameters.

    `forward(batch)` returns a tensor, or a tuple of two or more, each [B, ...], with gradients in float32.
    """


def fronts_of(module: nn.Module) -> dict[str, Front]:
    """Returns the layers before the cut by name, without nested ones; ValueError if it cannot be cut."""
    found: dict[str, Front] = {}
    for name, layer in module.named_modules():  # those inside a layer come after it
        if isinstance(layer, Front) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = layer
    of = type(module).__name__
    if "" in found:
        raise ValueError(f"{of} is itself a front, so no layers are left for heter trainers")
    for name, front in found.items():
        if owned := [each for each, _ in front.named_parameters()]:
            raise ValueError(
                f"{of}: {name} is before the cut but has dense parameters, {owned}, which heter trainers "
                f"train: move them out of the {type(front).__name__}"
            )
    return found


Pooling = Literal["sum", "mean", "max", "none"]


class SlotEmbedding(Front):
    """Looks up the keys of slots in a table on the servers, and pools the rows of each slot."""

    def __init__(
        self,
        slots: Sequence[str] | None = None,
        *,
        dim: int,
        pooling: Pooling = "sum",
        init_range: float = 0.01,
        crosses: Sequence[tuple[str, str]] = (),
        histories: Sequence[str] = (),
        table: str | None = None,
        optimizer: Mapping[str, str | float] | None = None,
    ) -> None:
        """Declares a table, or a part of a table that several embeddings share.

        `slots` are names, None: all of the schema; each pair of `crosses` is one more slot, after these.
        `histories` are slots whose rows are returned one by one, beside the pooled ones of the others.
        `dim` is the width of the rows, new ones are uniform in [-init_range, init_range). `pooling` is "sum",
        "mean" or "max" of a slot's rows, zeros without any, or "none". `table` is by default the attribute
        that holds this module; embeddings that name the same table share its rows, dim, range and
        `optimizer`, as in a job, None: the job's. Raises ValueError if the width is less than 1, the range
        negative, the pooling unknown, or "none" beside histories.
        """
        super().__init__()
        require_widths(dim=dim)
        require_range(init_range)
        if pooling not in ("sum", "mean", "max", "none"):
            raise ValueError(f"pooling is {pooling!r}, expected sum, mean, max or none")
        if histories and pooling == "none":
            raise ValueError(
                "pooling is 'none' beside histories: name all of these slots in histories"
            )
        if isinstance(slots, str) or isinstance(histories, str):
            raise ValueError(
                f"slots are {slots!r}, histories {histories!r}, expected lists of names"
            )
        self.slots = None if slots is None else tuple(slots)
        self.crosses = tuple((first, second) for first, second in crosses)
        self.dim = dim
        self.pooling = pooling
        self.init_range = init_range
        self.optimizer = optimizer
        self.table = table
        own = [
            SlotEmbedding(
                [each], dim=dim, pooling="none", init_range=init_range, optimizer=optimizer
            )
            for each in histories
        ]
        self.histories = nn.ModuleList(own) if own else ()
        self._columns: list[int] | None = None  # of its slots among those of the table; None: all
        self._on_device: dict[torch.device, Tensor] = {}  # the columns, copied once

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Refuses to freeze rows, which the servers' optimizers train."""
        if requires_grad:
            return self
        raise ValueError(
            f"{self!r} cannot be frozen, as the servers train its rows: only a loop of your own can freeze "
            "an `Embedding`"
        )

    def sources(self, schema: Schema) -> list[tuple[int, int]]:
        """Returns (slot number, -1) for each slot, then the crosses; ValueError for an unknown slot."""
        names: Sequence[str] = self.slots or ()
        if self.slots is None:
            apart = [name for each in self.histories for name in each.slots]
            names = [name for name in schema.slots if name not in apart]
        plain = [(schema.slot_index(name), -1) for name in names]
        return plain + [(schema.slot_index(a), schema.slot_index(b)) for a, b in self.crosses]

    def take_part(self, table: str, columns: Sequence[int] | None) -> None:
        """Restricts the embedding to some of a table's slots, by position; None: all."""
        self.table = table
        self._columns = None if columns is None else list(columns)
        self._on_device = {}

    def forward(self, batch: Batch) -> Any:
        """Returns the embeddings of the slots, float32[B, S, D].

        With pooling "none": float32[B, S, T, D], padded with zeros to the largest number T of keys of a slot,
        and the mask bool[B, S, T]. With histories a tuple: the embeddings of the other slots, then of each
        history its rows float32[B, T, D] and its mask bool[B, T].
        """
        fields = self._fields(batch)
        if not self.histories:
            return fields
        of_histories = (each.squeeze(1) for history in self.histories for each in history(batch))
        return (fields, *of_histories)

    def _fields(self, batch: Batch) -> Any:
        if self.table is None or self.table not in batch.rows:
            raise ModelInputError(
                f"{self!r} is not part of the module: assign it to an attribute, or use nn.ModuleList or "
                "nn.ModuleDict"
            )
        rows = batch.rows[self.table]
        if self.pooling in ("max", "none"):
            padded, is_there = self._padded(rows, batch.size)
            return (padded, is_there) if self.pooling == "none" else _largest(padded, is_there)
        pooled = _sum(rows, batch.size)
        if self.pooling == "mean" and rows.offsets is not None:
            counts = _counts(rows.offsets, batch.size, rows.num_slots)
            pooled = pooled / counts.clamp(min=1).unsqueeze(-1)
        return self._own(pooled)

    def _own(self, of_table: Tensor) -> Tensor:
        """Returns of [B, S of the table, ...] those of its own slots."""
        if self._columns is None:
            return of_table
        if (device := of_table.device) not in self._on_device:
            self._on_device[device] = torch.tensor(self._columns, device=device)
        return of_table.index_select(1, self._on_device[device])

    def _padded(self, rows: Rows, size: int) -> tuple[Tensor, Tensor]:
        """Returns rows [B, S, T, D] of its slots, padded with zeros, and the mask bool[B, S, T]."""
        if rows.offsets is None:
            found = self._own(rows.weights.view(size, rows.num_slots, 1, -1))
            return found, torch.ones(found.shape[:3], dtype=torch.bool, device=found.device)
        firsts = self._own(rows.offsets[:-1].view(size, rows.num_slots))
        counts = self._own(_counts(rows.offsets, size, rows.num_slots))
        if rows.longest is not None:
            longest = rows.longest if self._columns is None else rows.longest[self._columns]
            most = int(longest.max(initial=0))
        else:
            most = int(counts.max()) if counts.numel() else 0
        places = torch.arange(most, dtype=torch.int32, device=counts.device)
        there = places < counts.unsqueeze(-1)
        if not len(rows.weights):
            return rows.weights.new_zeros((*there.shape, rows.weights.shape[1])), there
        chosen = (firsts.unsqueeze(-1) + places).masked_fill(~there, 0).view(-1)
        if rows.inverse is not None:
            chosen = rows.inverse.index_select(0, chosen)
        padded = rows.weights.index_select(0, chosen).view(*there.shape, rows.weights.shape[1])
        # Not by a product: the row that stands behind may be infinite, and so may its gradient there.
        return padded.masked_fill(~there.unsqueeze(-1), 0.0), there

    def extra_repr(self) -> str:
        """Returns what distinguishes this module, for `print`."""
        slots = "all slots" if self.slots is None else f"{len(self.slots)} slots"
        return f"{slots}, dim={self.dim}, pooling={self.pooling!r}, table={self.table!r}"


def _sum(rows: Rows, size: int) -> Tensor:
    if rows.lookup is not None:
        pooled: Tensor = _Sum.apply(rows.weights, rows.lookup, size)
        return pooled
    if rows.offsets is None:
        return rows.weights.view(size, rows.num_slots, -1)
    slots = torch.arange(size * rows.num_slots, device=rows.weights.device)
    slot_of = slots.repeat_interleave(rows.offsets.diff(), output_size=len(rows.weights))
    sums = rows.weights.new_zeros((len(slots), rows.weights.shape[1]))
    return sums.index_add(0, slot_of, rows.weights).view(size, rows.num_slots, -1)


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


def _counts(offsets: Tensor, size: int, num_slots: int) -> Tensor:
    return offsets.diff().view(size, num_slots)


def _largest(padded: Tensor, is_there: Tensor) -> Tensor:
    if not padded.shape[2]:
        return padded.sum(2)
    largest = padded.masked_fill(~is_there.unsqueeze(-1), -torch.inf).amax(2)
    return largest.masked_fill(~is_there.any(2).unsqueeze(-1), 0.0)


_NO_SLOT = -1
DENSE = "dense"


def name_tables(module: nn.Module) -> None:
    """Names the table of each embedding without one after its place in the module."""
    for name, embedding in _embeddings(module):  # one before its histories
        embedding.table = embedding.table or name.replace(".", "_")
        for history in embedding.histories:
            history.table = embedding.table
        if embedding.table == DENSE:
            raise ValueError(
                f"a table cannot be called {DENSE!r}, the name of the dense parameters: choose another with "
                "table="
            )


def tables_of(module: nn.Module, schema: Schema) -> tuple[EmbeddingTable, ...]:
    """Returns the tables of a module, and assigns its embeddings their parts.

    ValueError if embeddings disagree, or one has a slot that the schema has not.
    """
    shared: dict[str, list[SlotEmbedding]] = {}
    for _, embedding in _embeddings(module):
        shared.setdefault(embedding.table or "", []).append(embedding)
    return tuple(_table(name, each, schema) for name, each in shared.items())


def _embeddings(module: nn.Module) -> list[tuple[str, SlotEmbedding]]:
    return [
        (name or "embedding", each)
        for name, each in module.named_modules()
        if isinstance(each, SlotEmbedding)
    ]


def _table(name: str, embeddings: Sequence[SlotEmbedding], schema: Schema) -> EmbeddingTable:
    first = embeddings[0]
    for other in embeddings[1:]:
        for what in ("dim", "init_range", "optimizer"):
            ours, theirs = getattr(first, what), getattr(other, what)
            if ours != theirs:
                raise ValueError(
                    f"embeddings of table {name!r} have {what} {ours!r} and {theirs!r}, expected the same"
                )
    sources = [embedding.sources(schema) for embedding in embeddings]
    union = sorted(
        dict.fromkeys(source for each in sources for source in each),
        # Slots as in the schema, so that a table of all takes a batch as it is; crosses come behind them.
        key=lambda source: (source[1] != _NO_SLOT, source[0] if source[1] == _NO_SLOT else 0),
    )
    for embedding, own in zip(embeddings, sources, strict=True):
        embedding.take_part(name, None if own == union else [union.index(each) for each in own])
    plain = tuple(slot for slot, second in union if second == _NO_SLOT)
    return EmbeddingTable(
        name=name,
        dim=first.dim,
        init_range=first.init_range,
        slots=None if plain == tuple(range(len(schema.slots))) else plain,
        crosses=tuple(source for source in union if source[1] != _NO_SLOT),
        optimizer=first.optimizer,
    )
