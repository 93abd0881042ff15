"""Breakdown of an evaluation: by the values of slots or a column, and by predicted probability.

For values it keeps labels, predictions, weights and keys until the evaluation ends, and sorts them then;
docs/evaluation.md gives the sizes. Without values its memory does not depend on the number of examples.

Calibration is from a histogram of fixed size. The bits of a float32 from 0 to 1 ascend with it, so its
leading bits number the cells of the histogram. A cell is as wide as 2^-12 of its predictions. Buckets of
about equal numbers of examples are runs of cells: their borders are within that width of the quantiles, and
equal predictions are in one bucket.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import GROUP_SLOT, Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.ps_worker.data.bad_rows import silent_bad_rows
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.training.evaluation.groups import figures_of_groups, ratio

logger = logging.getLogger(__name__)

_Kind = TypeVar("_Kind", bound=np.generic)

SLICED_VALUES = 10  # reported values of a slot, the most frequent ones


_DROPPED_BITS = 23 - 12  # of the mantissa
_CELLS = (int(np.float32(1).view(np.uint32)) >> _DROPPED_BITS) + 1


class Calibration:
    """Examples by their predictions, in 20 MB for any number of them. Not thread-safe."""

    def __init__(self) -> None:
        self._examples = np.zeros(_CELLS, np.int64)
        self._weight, self._clicks, self._predicted = np.zeros((3, _CELLS))
        self._lowest = np.ones(_CELLS, np.float32)
        self._highest = np.zeros(_CELLS, np.float32)

    def add(
        self,
        clicked: NDArray[np.bool_],
        probabilities: NDArray[np.float32],
        weights: NDArray[np.float32],
    ) -> None:
        """Counts N examples by their predicted probability of a click, from 0 to 1."""
        positive = probabilities + np.float32(0)  # -0 has a bit that 0 has not
        cells = positive.view(np.uint32) >> np.uint32(_DROPPED_BITS)
        weight = weights.astype(np.float64)
        np.add.at(self._examples, cells, 1)
        np.add.at(self._weight, cells, weight)
        np.add.at(self._clicks, cells, weight * clicked)
        np.add.at(self._predicted, cells, weight * positive)
        np.minimum.at(self._lowest, cells, positive)
        np.maximum.at(self._highest, cells, positive)

    def buckets(self, number: int) -> list[dict[str, Any]]:
        """Returns the figures of up to `number` non-empty buckets, by ascending prediction."""
        cells = np.flatnonzero(self._examples)
        if not cells.size:
            return []
        examples = self._examples[cells]
        middle = np.cumsum(examples) - examples / 2  # of each cell, among all examples
        bucket_of_cell = (middle * number / examples.sum()).astype(np.int64)
        starts = np.flatnonzero(np.diff(bucket_of_cell, prepend=-1))
        sums = (
            np.add.reduceat(array[cells], starts).tolist()
            for array in (self._examples, self._weight, self._predicted, self._clicks)
        )
        lowest = self._lowest[cells[starts]].tolist()
        highest = self._highest[cells[np.append(starts[1:], cells.size) - 1]].tolist()
        return [
            {
                "examples": count,
                "weight": weight,
                "lowest": low,
                "highest": high,
                "predicted": ratio(predicted, weight),
                "click_rate": ratio(clicks, weight),
                "calibration": ratio(predicted, clicks),
            }
            for count, weight, predicted, clicks, low, high in zip(
                *sums, lowest, highest, strict=True
            )
        ]


def calibration_error(buckets: list[dict[str, Any]]) -> float:
    """Returns the mean distance of predicted and actual click rate over buckets, by weight; nan without any.

    The expected calibration error: Naeini, Cooper and Hauskrecht, "Obtaining Well Calibrated Probabilities
    Using Bayesian Binning", 2015.
    """
    weighing = [each for each in buckets if each["weight"] > 0]
    distances = sum(
        each["weight"] * abs(each["predicted"] - each["click_rate"]) for each in weighing
    )
    return ratio(distances, sum(each["weight"] for each in weighing))


MAX_ROWS = 1_000_000  # limit of rows to read again: other values are reported by key only


class ValueTexts:
    """Finds texts of values in files, each once. For one thread.

    Hashes cannot be inverted, so the evaluated files are searched for the values. The most frequent ones of a
    slot are found early, after reading few rows.
    """

    def __init__(self, files: Sequence[str], schema: Schema, format: str | None) -> None:
        self._files = files
        self._schema = schema
        self._format = format
        self._found: dict[tuple[str, int], str] = {}
        # Each validation asks again for those without a text.
        self._sought: set[tuple[str, int]] = set()

    def find(self, slot: str, keys: Iterable[int]) -> dict[int, str]:
        """Returns the texts of the values of a slot with these keys, as far as they are found."""
        keys = list(keys)
        if missing := {key for key in keys if (slot, key) not in self._sought}:
            self._sought |= {(slot, key) for key in missing}
            self._read(slot, missing)
        return {key: self._found[slot, key] for key in keys if (slot, key) in self._found}

    def _read(self, slot: str, missing: set[int]) -> None:
        # Imported late: most evaluations have no slices, and not all files are Arrow's to read.
        from ctr_ps.ps_worker.data.distinct_values import DistinctValues

        bad_rows = silent_bad_rows()  # the evaluation has reported them
        values = DistinctValues(
            self._files, self._schema, slot, format=self._format, bad_rows=bad_rows
        )
        wanted = np.array(sorted(missing), np.uint64)
        try:
            for texts, keys in values:
                for place in np.flatnonzero(np.isin(keys, wanted)):
                    text = texts[int(place)].as_py().decode(errors="backslashreplace")
                    self._found[slot, int(keys[place])] = text
                    missing.discard(int(keys[place]))
                if not missing or values.rows > MAX_ROWS:
                    return
        except CtrPsError as error:
            # A file of keys or a format without values: the figures are reported by key.
            logger.info("the texts of values of slot %s are unknown: %s", slot, error)


@dataclass(slots=True)
class _Keys:
    keys: list[NDArray[np.uint64]] = field(default_factory=list)
    counts: list[NDArray[np.int32]] = field(default_factory=list)


class _Examples(NamedTuple):
    clicked: NDArray[np.bool_]
    probabilities: NDArray[np.float32]
    weights: NDArray[np.float32]

    def at(self, rows: NDArray[Any]) -> "_Examples":
        return _Examples(self.clicked[rows], self.probabilities[rows], self.weights[rows])


class BreakdownFigures(TypedDict, total=False):
    """Those figures of an evaluation that `[valid]` requests."""

    calibration_error: float | None
    calibration_buckets: list[dict[str, Any]]
    gauc: float | None
    groups: dict[str, Any]
    slices: dict[str, list[dict[str, Any]]]


class Breakdown:
    """Labels, predictions and keys of an evaluation. Not thread-safe."""

    def __init__(
        self,
        schema: Schema,
        *,
        # slot whose values are the groups of GAUC; another name: that of the column in
        # `Batch.groups`; empty: none
        group_by: str = "",
        slices: Sequence[str] = (),  # slots whose most frequent values are reported
        buckets: int = 10,  # buckets of calibration; 0: none
        texts: ValueTexts | None = None,  # finds the texts of reported values; None: keys only
    ) -> None:
        """Takes the groups and slots of interest. Raises ValueError if the schema has no slot of `slices`."""
        self._group_by, self._slices, self._buckets = group_by, tuple(slices), buckets
        self._texts = texts
        self._keys = {name: _Keys() for name in self._slices}
        self._slot_index = {name: schema.slot_index(name) for name in self._slices}
        self._group_slot = schema.slot_index(group_by) if group_by in schema.slots else None
        self._groups: list[NDArray[np.uint64]] = []
        self._no_group = np.uint64(0)
        if group_by:
            index = self._group_slot
            hashed_as = GROUP_SLOT if index is None else schema.slot_numbers[index]
            self._no_group = np.uint64(key_of(hashed_as, b""))
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
        if not self._keeps_examples:
            return
        self._clicked.append(clicked)
        self._probabilities.append(probabilities.copy())
        self._weights.append(weights)
        if self._group_by:
            self._groups.append(self._groups_of(batch))
        for name, kept in self._keys.items():
            begin, counts = _bounds_of_slot(batch, self._slot_index[name])
            kept.keys.append(batch.keys[_positions(begin, counts)])
            kept.counts.append(counts)

    def figures(self) -> BreakdownFigures:
        """Returns the requested figures, by their names in summaries."""
        if self._is_empty:
            return {}
        figures: BreakdownFigures = {}
        if self._calibration is not None:
            buckets = self._calibration.buckets(self._buckets)
            figures["calibration_error"] = calibration_error(buckets)
            figures["calibration_buckets"] = buckets
        if not self._keeps_examples:
            return figures
        examples = _Examples(
            _whole(self._clicked), _whole(self._probabilities), _whole(self._weights)
        )
        if self._group_by:
            figures |= self._grouped(examples)
        if self._slices:
            figures["slices"] = {slot: self._sliced(slot, examples) for slot in self._slices}
        return figures

    @property
    def _keeps_examples(self) -> bool:
        return bool(self._group_by or self._slices)

    def _groups_of(self, batch: Batch) -> NDArray[np.uint64]:
        """Returns uint64[B], the group of each example by its first value; `_no_group` without one."""
        if self._group_slot is None:
            assert batch.groups is not None  # labelled rows to evaluate have them
            return batch.groups
        begin, counts = _bounds_of_slot(batch, self._group_slot)
        groups = np.full(batch.size, self._no_group)
        groups[counts > 0] = batch.keys[begin[counts > 0]]
        return groups

    def _grouped(self, examples: "_Examples") -> BreakdownFigures:
        """Returns GAUC, without the examples of a missing value."""
        of_all = figures_of_groups(_whole(self._groups), *examples)
        groups = of_all.without(self._no_group)
        one_class = np.isnan(groups.auc)
        return {
            "gauc": groups.gauc(),
            "groups": {
                "group_by": self._group_by,
                "groups": int(groups.keys.size),
                "one_class_groups": int(np.count_nonzero(one_class)),
                "one_class_examples": int(groups.examples[one_class].sum()),
                "examples_without_value": int(of_all.examples.sum() - groups.examples.sum()),
            },
        }

    def _sliced(self, slot: str, examples: "_Examples") -> list[dict[str, Any]]:
        """Returns the figures of a slot's most frequent values; an example counts for each of its values."""
        keys, counts = _whole(self._keys[slot].keys), _whole(self._keys[slot].counts)
        of_keys = examples.at(np.repeat(np.arange(counts.size), counts))
        told = figures_of_groups(keys, *of_keys).most_frequent(SLICED_VALUES)
        if self._texts is None:
            return told
        texts = self._texts.find(slot, (int(each["key"]) for each in told))
        return [{"value": texts.get(int(each["key"])), **each} for each in told]


def breakdown_of(job: Job, schema: Schema, files: Sequence[str] = ()) -> Callable[[], Breakdown]:
    """Returns a factory of the breakdown that `[valid]` requests.

    `files` are evaluated, and provide the texts of values. Raises JobError for an unknown slot in
    `valid.slices`.
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
        with job.errors("valid.slices", ValueError):
            schema.slot_index(name)
    return new


def _bounds_of_slot(batch: Batch, slot: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns int32[B] twice: the start and number of a slot's keys in each example."""
    begin = batch.offsets[:-1].reshape(-1, batch.num_slots)[:, slot]
    end = batch.offsets[1:].reshape(-1, batch.num_slots)[:, slot]
    return begin, end - begin


def _positions(begin: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the positions of stretches that begin at `begin` and have `counts` elements, in order."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    shifts: NDArray[np.int64] = begin - (ends - counts)
    return np.arange(total, dtype=np.int64) + np.repeat(shifts, counts)


def _whole(arrays: list[NDArray[_Kind]]) -> NDArray[_Kind]:
    """Returns arrays as one, which replaces them in the list, so that they are in memory once."""
    arrays[:] = [np.concatenate(arrays)]
    return arrays[0]
