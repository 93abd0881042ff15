"""Inputs of models that attend to histories: slots with keys in order of time; see docs/models.md."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.layers.pooling import Pooling, SlotOptions, require_widths
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.zoo.pooled import PooledInput


class Inputs(PooledInput):
    """The numbers, pooled slots, and rows of histories."""

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
        require_widths(max_length=max_length)
        targets = dict(schema.shares if histories is None else histories)
        _require_histories(schema, targets, slots)
        super().__init__(schema, dim, init_range, pooling, slots, apart=targets)
        self.targets, self._max_length = targets, max_length
        self.rows = nn.ModuleList(self.embedding([name], "none") for name in targets)

    def histories(self, batch: Batch) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yields each history, its target, its rows float32[B, T, D] and their ages int64[B, T].

        The last key has age 0; places without a key, or before the last `max_length`, have age -1.
        """
        for (history, target), embedding in zip(self.targets.items(), self.rows, strict=True):
            rows, is_there = (each.squeeze(1) for each in embedding(batch))
            places = torch.arange(rows.shape[1], device=rows.device)
            ages = (is_there.sum(1, keepdim=True) - 1 - places).clamp(min=-1)
            yield history, target, rows, ages.masked_fill(ages >= self._max_length, -1)


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
