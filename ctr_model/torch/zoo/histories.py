"""Inputs of models that attend to histories: slots with keys in order of time; see docs/models.md."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import PooledSlots, Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding


class Inputs(nn.Module):
    """The numbers, pooled slots, and rows of histories; `width` and tables are those of `PooledSlots`."""

    def __init__(
        self,
        schema: Schema,
        dim: int,
        init_range: float,
        pooling: Pooling,
        slots: Mapping[str, SlotOptions],
        histories: Mapping[str, str] | None,
        max_length: int,
    ) -> None:
        super().__init__()
        require_widths(max_length=max_length)
        self.targets = dict(schema.shares if histories is None else histories)
        _require_histories(schema, self.targets, slots)
        plan = PooledSlots(schema, dim=dim, init_range=init_range, pooling=pooling, slots=slots)
        self.width, self._max_length, self._slots = plan.width, max_length, schema.slots
        widths = (column.stop - column.start for column in plan.columns)
        self.dims = dict(zip(schema.slots, widths, strict=True))

        def embedding(names: list[str], pooling: Any) -> SlotEmbedding:
            width = self.dims[names[0]]
            table = "embedding" if width == dim else f"embedding_{width}"
            return SlotEmbedding(
                names, dim=width, pooling=pooling, init_range=init_range, table=table
            )

        groups: dict[tuple[int, object], list[str]] = {}
        for name in schema.slots:
            if name not in self.targets:
                own = slots.get(name, {}).get("pooling", pooling)
                groups.setdefault((self.dims[name], own), []).append(name)
        self.pooled = nn.ModuleList(embedding(names, own) for (_, own), names in groups.items())
        self.rows = nn.ModuleList(embedding([name], "none") for name in self.targets)

    def slots(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the pooled embedding float32[B, D] of each slot, except of histories."""
        return {
            name: vector
            for each in self.pooled
            for name, vector in zip(each.slots, each(batch).unbind(1), strict=True)
        }

    def histories(self, batch: Batch) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yields each history, its target, its rows float32[B, T, D] and their ages int64[B, T].

        The last key has age 0; places without a key, or before the last `max_length`, have age -1.
        """
        for (history, target), embedding in zip(self.targets.items(), self.rows, strict=True):
            rows, is_there = (each.squeeze(1) for each in embedding(batch))
            places = torch.arange(rows.shape[1], device=rows.device)
            ages = (is_there.sum(1, keepdim=True) - 1 - places).clamp(min=-1)
            yield history, target, rows, ages.masked_fill(ages >= self._max_length, -1)

    def concatenated(self, batch: Batch, vectors: Mapping[str, Tensor]) -> Tensor:
        """Returns [dense | slot 1 | ... | slot S], float32[B, width]."""
        return torch.cat([batch.dense, *(vectors[name] for name in self._slots)], dim=1)


def _require_histories(
    schema: Schema, targets: Mapping[str, str], slots: Mapping[str, SlotOptions]
) -> None:
    """Raises ValueError unless each target is another slot with the same keys and dim."""
    if not targets:
        raise ValueError(
            "histories is empty, and no slots of the schema share keys: name a history and its target in "
            'the schema, such as shares = { history = "item" }'
        )
    for name, target in targets.items():
        where = f"histories.{name}"
        history, shown = (schema.slot_index(each, where=where) for each in (name, target))
        if target in targets:
            raise ValueError(
                f"{where} is {target!r}, which is itself a history: name a slot that is not"
            )
        if schema.slot_numbers[history] != schema.slot_numbers[shown]:
            raise ValueError(
                f"{where} is {target!r}, but equal values of the two slots have different keys: "
                f'share them in the schema, shares = {{ {name} = "{target}" }}'
            )
        own = slots.get(name, {})
        if "pooling" in own:
            raise ValueError(
                f"slots.{name}.pooling: {name!r} is a history, pooled by attention: remove this option"
            )
        if own.get("dim") != slots.get(target, {}).get("dim"):
            raise ValueError(
                f"slots.{name}.dim: the history {name!r} and its target {target!r} have the same rows, so "
                "they need the same dim"
            )
