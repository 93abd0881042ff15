"""Profiles: statistics of the columns of files, in one pass, and a schema that scales them.

Works for every format with a reader, which provides unscaled numbers (as float32, with seven digits) and
keys.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.parameters import select_slots
from ctr_ps.ctr_model.schema import DenseColumn, Schema, Transform
from ctr_ps.ctr_model.schema.dense_column import FLOAT32_MAX
from ctr_ps.protos.errors import DataError, counted
from ctr_ps.ps_worker.data.blocks.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks.batching import RowColumnCheck
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import Format, reader_of
from ctr_ps.ps_worker.extras.data_tools.profiling.number_stats import NumberStats
from ctr_ps.ps_worker.extras.data_tools.profiling.value_counts import ValueCounts
from ctr_ps.ps_worker.extras.data_tools.profiling.value_texts import value_texts

logger = logging.getLogger(__name__)

NUM_BOUNDARIES = 21  # of "quantile": every 5 %
_NUM_TOP = 5
_SHARES = np.linspace(0.0, 1.0, NUM_BOUNDARIES)
_PERCENTILE_95 = NUM_BOUNDARIES - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberProfile:
    """Statistics of a dense column; all 0 if all numbers are missing. All are exact except percentiles.

    Attributes:
        name: Of the column.
        missing_rate: Share of the rows, in [0, 1].
        min: Smallest number.
        max: Largest number.
        mean: Mean.
        deviation: Population standard deviation.
        log_mean: Mean of f(x) = sign(x) log(1 + |x|).
        log_deviation: Deviation of f(x).
        percentiles: The percentiles 0, 5, ..., 100.
    """

    name: str
    missing_rate: float
    min: float
    max: float
    mean: float
    deviation: float
    log_mean: float
    log_deviation: float
    percentiles: tuple[float, ...]

    @property
    def percentile_95(self) -> float:
        """The 95th percentile, by which Paddle's tutorials normalise."""
        return self.percentiles[_PERCENTILE_95]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotProfile:
    """Statistics of a slot.

    Attributes:
        name: Of the slot.
        missing_rate: Share of the rows, in [0, 1], with an empty value or none.
        num_distinct: Number of distinct values, without the missing one.
        is_exact: Whether `num_distinct`, else with a standard error of 0.81 %, and `top` are exact.
        top: The most frequent values and their counts.
        undercount: The largest error of the counts of `top`, which may be too small.
    """

    name: str
    missing_rate: float
    num_distinct: int
    is_exact: bool
    top: tuple[tuple[str, int], ...]
    undercount: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Statistics of files.

    Attributes:
        schema: The columns, with the scaling that was given for them.
        rows: Good rows.
        bad_rows: Malformed rows.
        click_rate: Share of clicks; None for rows without labels.
        numbers: Dense columns, in order.
        slots: Slots, in order.
        has_exact_percentiles: Whether percentiles are exact instead of those of a sample (`number_stats`).
    """

    schema: Schema
    rows: int
    bad_rows: int
    click_rate: float | None
    numbers: tuple[NumberProfile, ...]
    slots: tuple[SlotProfile, ...]
    has_exact_percentiles: bool


def profile_files(
    files: Sequence[str], schema: Schema, *, format: Format | None = None, bad_row_limit: int = 0
) -> Profile:
    """Returns the profile of files.

    Args:
        files: Paths or URLs.
        schema: Names of the columns; its scaling is ignored.
        format: None: determined by the suffix.
        bad_row_limit: Malformed rows to skip; one more is an error.

    Raises:
        DataError: If a file cannot be read, there are no rows, or only some files have labels.
        BadRowError: Names the malformed row that exceeded the limit.
    """
    bad_rows = BadRows(bad_row_limit)
    labels = RowColumnCheck(schema)
    columns = _Columns(schema)
    for path in files:
        reader = reader_of(path, columns.schema, bad_rows, format)
        rows_before = columns.stats.rows
        for block in reader.blocks(FileSplit(path)):
            labels.require(path, block.rows)
            columns.add(block.rows)
        if columns.stats.rows == rows_before:
            logger.warning("a file has no rows: file=%s", path)
    if columns.stats.rows == 0:
        raise DataError(f"no rows in {counted(len(files), 'file')} ({bad_rows.total} malformed)")
    bad_rows.report(columns.stats.rows)
    return columns.profile(files, format, bad_rows.total)


def schema_of(
    profile: Profile, transform: Transform, *, missing_indicators: bool = False
) -> Schema:
    """Returns a schema that scales the columns of a profile.

    Args:
        profile: Of the training data.
        transform: "none" and "log1p" standardise; "min_max" uses the minimum and the 95th percentile, as
            Paddle's tutorials do, without clipping; "quantile" uses the percentiles 0, 5, ..., 100.
        missing_indicators: Whether to add indicators to columns with missing numbers.
    """
    return replace(
        profile.schema,
        dense=tuple(
            replace(
                scaled(column, transform),
                missing_indicator=missing_indicators and column.missing_rate > 0,
            )
            for column in profile.numbers
        ),
    )


def scaled(column: NumberProfile, transform: Transform) -> DenseColumn:
    """Returns the column with the transform; a constant or always missing column is only shifted."""
    name = column.name
    # The squares of numbers below 1e-162 are 0, and so is their deviation: they count as constant.
    divisor = {"log1p": column.log_deviation, "none": column.deviation}.get(transform)
    if column.min == column.max or divisor == 0:
        return DenseColumn(name=name, shift=column.min)
    if transform == "min_max":
        # By the maximum if 95 % of the numbers are the minimum, or that would be beyond float32.
        high = column.percentile_95 if column.percentile_95 > column.min else column.max
        if (column.max - column.min) / (high - column.min) > FLOAT32_MAX:
            high = column.max
        return DenseColumn(name=name, transform=transform, min=column.min, max=high)
    if transform == "quantile":
        return DenseColumn(name=name, transform=transform, boundaries=column.percentiles)
    if transform == "log1p":
        return DenseColumn(
            name=name, transform=transform, shift=column.log_mean, scale=column.log_deviation
        )
    return DenseColumn(name=name, shift=column.mean, scale=column.deviation)


def number_profile(stats: NumberStats, column: int, name: str) -> NumberProfile:
    """Returns the profile of column number `column` of the statistics."""
    count = int(stats.moments.counts[column])
    percentiles = stats.percentiles(column, _SHARES) if count else np.zeros(NUM_BOUNDARIES)
    return NumberProfile(
        name=name,
        missing_rate=1 - count / stats.rows,
        min=float(percentiles[0]),
        max=float(percentiles[-1]),
        mean=float(stats.moments.means[column]),
        deviation=float(stats.moments.deviations[column]),
        log_mean=float(stats.log_moments.means[column]),
        log_deviation=float(stats.log_moments.deviations[column]),
        percentiles=tuple(percentiles.tolist()),
    )


class _Columns:
    """Statistics of the columns so far.

    Attributes:
        schema: Schema for reading: unscaled numbers, with an indicator for each.
        stats: Of the numbers.
    """

    def __init__(self, schema: Schema) -> None:
        self._given = schema
        self.schema = replace(
            schema,
            dense=tuple(
                DenseColumn(name=column.name, missing_indicator=True) for column in schema.dense
            ),
        )
        self.stats = NumberStats(len(schema.dense))
        num_slots = len(schema.slots)
        self._missing_keys = [np.uint64(key_of(number, "")) for number in schema.slot_numbers]
        self._values = [ValueCounts() for _ in schema.slots]
        self._present = [0] * num_slots  # rows with a value
        self._clicks: float | None = None  # None: rows without labels

    def add(self, rows: Batch) -> None:
        """Adds rows."""
        num_columns = len(self.schema.dense)
        numbers = rows.dense[:, :num_columns].astype(np.float64)
        numbers[rows.dense[:, num_columns:] == 1] = np.nan
        self.stats.add(numbers)
        for slot in range(rows.num_slots):
            self._add_slot(slot, rows)
        if rows.labels is not None:
            self._clicks = (self._clicks or 0.0) + float(rows.labels.sum())

    def _add_slot(self, slot: int, rows: Batch) -> None:
        selected = select_slots(rows, (slot,))
        is_there = selected.keys != self._missing_keys[slot]
        present = selected.keys[is_there]
        self._values[slot].add(present)
        before = np.concatenate([[0], np.cumsum(is_there)])[selected.offsets]  # [B + 1]
        self._present[slot] += int(np.count_nonzero(np.diff(before)))

    def profile(self, files: Sequence[str], format: Format | None, bad_rows: int) -> Profile:
        """Returns the profile; shows values as their text if the format of `files` has it, else as keys."""
        tops = [values.top(_NUM_TOP) for values in self._values]
        wanted = [{key for key, _ in top} for top in tops]
        if format is None or isinstance(format, str):
            texts = value_texts(files, self.schema, wanted, format)
        else:  # a reader of one's own yields keys
            texts = [{} for _ in wanted]
        return Profile(
            schema=self._given,
            rows=self.stats.rows,
            bad_rows=bad_rows,
            click_rate=None if self._clicks is None else self._clicks / self.stats.rows,
            numbers=tuple(
                number_profile(self.stats, index, column.name)
                for index, column in enumerate(self.schema.dense)
            ),
            slots=tuple(
                SlotProfile(
                    name=name,
                    missing_rate=1 - self._present[slot] / self.stats.rows,
                    num_distinct=self._values[slot].num_distinct,
                    is_exact=self._values[slot].is_exact,
                    top=tuple((texts[slot].get(key, hex(key)), count) for key, count in tops[slot]),
                    undercount=self._values[slot].undercount,
                )
                for slot, name in enumerate(self.schema.slots)
            ),
            has_exact_percentiles=self.stats.is_exact,
        )
