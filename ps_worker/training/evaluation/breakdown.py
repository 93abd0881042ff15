"""Breakdown of an evaluation: by the values of slots or a column, and by predicted probability.

For values it keeps labels, predictions, weights and keys until the evaluation ends: 9 bytes an example and
8 bytes a key. Without them its memory does not depend on the number of examples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import GROUP_SLOT, Batch
from ctr_model.features import key_of
from ctr_model.schema import Schema
from ps_worker.job import Job
from ps_worker.training.evaluation.calibration import Calibration, calibration_error
from ps_worker.training.evaluation.groups import figures_of_groups
from ps_worker.training.evaluation.value_texts import ValueTexts

SLICED_VALUES = 10
"""Most frequent values of a slot that are told."""


@dataclass(slots=True)
class _Keys:
    """Keys of one slot or column, and how many each example has."""

    keys: list[NDArray[np.uint64]] = field(default_factory=list)
    counts: list[NDArray[np.int32]] = field(default_factory=list)


class _Examples(NamedTuple):
    """All examples of an evaluation, each array [N]."""

    clicked: NDArray[np.bool_]
    probabilities: NDArray[np.float32]
    weights: NDArray[np.float32]

    def at(self, rows: NDArray[Any]) -> "_Examples":
        return _Examples(self.clicked[rows], self.probabilities[rows], self.weights[rows])


class Breakdown:
    """Labels, predictions and keys of an evaluation. Not thread-safe."""

    def __init__(
        self,
        schema: Schema,
        *,
        group_by: str = "",
        slices: Sequence[str] = (),
        buckets: int = 10,
        texts: ValueTexts | None = None,
    ) -> None:
        """Has no examples yet.

        Args:
            schema: Says where slots are.
            group_by: Slot whose values are the groups of GAUC; another name: that of the column in
                `Batch.groups`; empty: none.
            slices: Slots whose most frequent values are told.
            buckets: Of calibration; 0: none.
            texts: Finds the texts of the values that are told; None: they have their keys alone.

        Raises:
            ValueError: If the schema has no slot of `slices`.
        """
        self._group_by, self._slices, self._buckets = group_by, tuple(slices), buckets
        self._texts = texts
        names = {*slices, *([group_by] if group_by else [])}
        self._keys = {name: _Keys() for name in sorted(names)}
        self._slot_index = {
            name: schema.slot_index(name) for name in names if name in {*slices, *schema.slots}
        }
        index = self._slot_index.get(group_by)
        self._hashed_as = GROUP_SLOT if index is None else schema.slot_numbers[index]
        self._calibration = Calibration() if buckets else None
        self._is_empty = True
        self._clicked: list[NDArray[np.bool_]] = []
        self._probabilities: list[NDArray[np.float32]] = []
        self._weights: list[NDArray[np.float32]] = []

    def add(self, batch: Batch, probabilities: NDArray[np.float32]) -> None:
        """Adds the examples of a batch with labels; `probabilities` float32[B] are copied."""
        if batch.labels is None:
            return
        self._is_empty = False
        clicked = batch.labels > np.float32(0.5)
        weights = np.ones(batch.size, np.float32) if batch.weights is None else batch.weights
        if self._calibration is not None:
            self._calibration.add(clicked, probabilities, weights)
        if not self._keys:
            return
        self._clicked.append(clicked)
        self._probabilities.append(probabilities.copy())
        self._weights.append(weights)
        for name, kept in self._keys.items():
            if name in self._slot_index:
                keys, counts = _keys_of_slot(batch, self._slot_index[name])
            else:
                assert batch.groups is not None  # labelled rows to evaluate have them
                keys, counts = batch.groups, np.ones(batch.size, np.int32)
            kept.keys.append(keys)
            kept.counts.append(counts)

    def figures(self) -> dict[str, Any]:
        """Returns the figures that were asked for, by their names in summaries."""
        if self._is_empty:
            return {}
        figures: dict[str, Any] = {}
        if self._calibration is not None:
            buckets = self._calibration.buckets(self._buckets)
            figures["calibration_error"] = calibration_error(buckets)
            figures["calibration_buckets"] = buckets
        if not self._keys:
            return figures
        examples = _Examples(
            np.concatenate(self._clicked),
            np.concatenate(self._probabilities),
            np.concatenate(self._weights),
        )
        if self._group_by:
            figures |= self._grouped(examples)
        if self._slices:
            figures["slices"] = {slot: self._sliced(slot, examples) for slot in self._slices}
        return figures

    def _kept(self, name: str) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        kept = self._keys[name]
        return np.concatenate(kept.keys), np.concatenate(kept.counts)

    def _grouped(self, examples: "_Examples") -> dict[str, Any]:
        """Returns GAUC; an example is in the group of its first value, one whose value is missing in none."""
        keys, counts = self._kept(self._group_by)
        is_some = counts > 0
        missing = np.uint64(key_of(self._hashed_as, b""))
        first = np.full(counts.size, missing)
        first[is_some] = keys[(np.cumsum(counts) - counts)[is_some]]
        has_value = first != missing
        groups = figures_of_groups(first[has_value], *examples.at(has_value))
        one_class = np.isnan(groups.auc)
        return {
            "gauc": groups.gauc(),
            "groups": {
                "group_by": self._group_by,
                "groups": int(groups.keys.size),
                "one_class_groups": int(np.count_nonzero(one_class)),
                "one_class_examples": int(groups.examples[one_class].sum()),
                "examples_without_value": int(np.count_nonzero(~has_value)),
            },
        }

    def _sliced(self, slot: str, examples: "_Examples") -> list[dict[str, Any]]:
        """Returns the figures of a slot's most frequent values; an example counts for each of its values."""
        keys, counts = self._kept(slot)
        rows = np.repeat(np.arange(counts.size), counts)
        told = figures_of_groups(keys, *examples.at(rows)).most_frequent(SLICED_VALUES)
        if self._texts is None:
            return told
        texts = self._texts.find(slot, (int(each["key"]) for each in told))
        return [{"value": texts.get(int(each["key"])), **each} for each in told]


def breakdown_of(job: Job, schema: Schema, files: Sequence[str] = ()) -> Callable[[], Breakdown]:
    """Returns what makes the breakdown of an evaluation, as `[valid]` says.

    Args:
        job: Names slots, and the column to group by.
        schema: Has the slots.
        files: That are evaluated, for the texts of values; of what a command prints they are not known.

    Raises:
        JobError: If the schema has no slot that it names in `valid.slices`.
    """
    valid, data = job.valid, job.data
    texts = ValueTexts(() if data.pipe_command else files, schema, data.format or None)

    def new() -> Breakdown:
        return Breakdown(
            schema,
            group_by=valid.group_by,
            slices=valid.slices,
            buckets=valid.calibration_buckets,
            texts=texts,
        )

    for name in valid.slices:
        try:
            schema.slot_index(name)
        except ValueError as error:
            raise job.error("valid.slices", str(error)) from error
    return new


def _keys_of_slot(batch: Batch, slot: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Returns a copy of the keys of the slot with an index, and int32[B], how many each example has."""
    begin = batch.offsets[:-1].reshape(-1, batch.num_slots)[:, slot]
    end = batch.offsets[1:].reshape(-1, batch.num_slots)[:, slot]
    return batch.keys[_positions(begin, end - begin)], end - begin


def _positions(begin: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the positions of stretches that begin at `begin` and have `counts` elements, in their order."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    shifts: NDArray[np.int64] = begin - (ends - counts)
    return np.arange(total, dtype=np.int64) + np.repeat(shifts, counts)
