"""A module on a device: tensors in, gradients as tensors out; only the data of a batch is transferred."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.checks import labels_of
from ctr_ps.ctr_model.parameters import EmbeddingTable, Ints
from ctr_ps.ctr_model.torch import batch as tensors
from ctr_ps.ctr_model.torch.model import LossResult, TorchModel

Slots = tuple[tuple[int, ...] | None, tuple[tuple[int, int], ...]]
"""Slots of a table and its crosses; tables of the same slots look up the same keys."""


def slots_of(table: EmbeddingTable) -> Slots:
    """Returns the slots of a table."""
    return table.slots, table.crosses


@dataclass(frozen=True, slots=True, eq=False)
class SlotRows:
    """The keys of a batch's slots, as numbers of rows."""

    rows: Tensor  # int32[L]
    offsets: Tensor | None  # int32[B * S + 1], as in `Lookup`; None: every slot has one key
    longest: Ints  # int32[S], the most keys that an example has in a slot


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceBatch:
    """A labelled batch for a device: there, or in memory of the host that a device copies from by itself."""

    dense: Tensor  # float32[B, num_dense]
    labels: Tensor  # float32[B], of T labels float32[B, T]
    weights: Tensor | None  # float32[B], sample weights
    slots: Mapping[Slots, SlotRows]

    @classmethod
    def of(
        cls,
        batch: Batch,
        slots: Mapping[Slots, SlotRows],
        device: torch.device,
        num_labels: int = 1,
    ) -> Self:
        """Returns a batch as `device` copies it; ModelInputError unless it has that many labels."""
        found = cls(
            dense=tensors.tensor_of(batch.dense),
            labels=tensors.tensor_of(labels_of(batch, num_labels)),
            weights=None if batch.weights is None else tensors.tensor_of(batch.weights),
            slots=slots,
        )
        return found._each(Tensor.pin_memory) if device.type == "cuda" else found

    def on(self, device: torch.device) -> Self:
        """Returns the batch on a device, where it may still be on its way."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def write(self, other: Self) -> None:
        """Overwrites this batch with another one of the same shapes."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.dense, self.labels)
        for each in (self.weights, *(slots.offsets for slots in self.slots.values())):
            if each is not None:
                yield each
        yield from (slots.rows for slots in self.slots.values())

    def _each(self, move: Callable[[Tensor], Tensor]) -> Self:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else move(tensor)

        return replace(
            self,
            dense=move(self.dense),
            labels=move(self.labels),
            weights=moved(self.weights),
            slots={
                key: replace(slots, rows=move(slots.rows), offsets=moved(slots.offsets))
                for key, slots in self.slots.items()
            },
        )


class DeviceModel:
    """The module of a `TorchModel` on a device, which no call waits for. For one thread."""

    def __init__(self, model: TorchModel, device: torch.device) -> None:
        self.workspace = model.workspace(1, device=device)
        self.slots = {table.name: slots_of(table) for table in model.tables}

    def gradient(
        self,
        params: Tensor,
        batch: DeviceBatch,
        rows: Mapping[str, Tensor],
        dense_grad: Tensor,
    ) -> tuple[LossResult, dict[str, Tensor | None]]:
        """Computes the gradients of the loss summed over the examples; all is on the device.

        `rows` are by table, float32[L, D], one for each key of the batch: a row that several keys have is
        there as often. Overwrites `dense_grad` float32[P]; returns, by table, those float32[L, D] of `rows`,
        None for zeros.
        """
        self.workspace.take(params)
        leaves = {}
        for name, weights in rows.items():
            slots = batch.slots[self.slots[name]]
            leaves[name] = tensors.Rows(
                weights=weights.requires_grad_(),
                inverse=None,
                offsets=slots.offsets,
                num_slots=slots.longest.size,
                longest=slots.longest,
            )
        seen = tensors.Batch(
            dense=batch.dense, labels=batch.labels, weights=batch.weights, rows=leaves
        )
        return self.workspace.gradient(seen, dense_grad)
