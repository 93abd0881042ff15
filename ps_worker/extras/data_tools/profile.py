"""Profiles: statistics of the columns of files, in one pass, tables of them, and a schema that scales.

Works for every format with a reader, which provides unscaled numbers (as float32, with seven digits) and
keys.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.parameters import SlotKeys, select_slots
from ctr_ps.ctr_model.schema import DenseColumn, Schema, Transform
from ctr_ps.ctr_model.schema.dense_column import FLOAT32_MAX
from ctr_ps.protos.errors import counted
from ctr_ps.protos.runtime.logs import printable
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.reading import Reading
from ctr_ps.ps_worker.extras.data_tools.column_stats import NumberStats, ValueCounts
from ctr_ps.ps_worker.training.evaluation.breakdown import ValueTexts

NUM_BOUNDARIES = 21  # of "quantile": every 5 %
_NUM_TOP = 5
_MAX_SHOWN = 24
_SHARES = np.linspace(0.0, 1.0, NUM_BOUNDARIES)
_PERCENTILE_95 = NUM_BOUNDARIES - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberProfile:
    """Statistics of a dense column; all 0 if all numbers are missing. All are exact except percentiles."""

    name: str
    missing_rate: float  # share of the rows, in [0, 1]
    min: float
    max: float
    mean: float
    deviation: float  # population standard deviation
    log_mean: float  # mean of f(x) = sign(x) log(1 + |x|)
    log_deviation: float  # deviation of f(x)
    percentiles: tuple[float, ...]  # the percentiles 0, 5, ..., 100

    @property
    def percentile_95(self) -> float:
        """The 95th percentile, by which Paddle's tutorials normalise."""
        return self.percentiles[_PERCENTILE_95]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotProfile:
    """Statistics of a slot."""

    name: str
    missing_rate: float  # share of the rows, in [0, 1], with an empty value or none
    num_distinct: int  # number of distinct values, without the missing one
    # whether `num_distinct`, else with a standard error of 0.81 %, and `top` are exact
    is_exact: bool
    top: tuple[tuple[str, int], ...]  # the most frequent values and their counts
    undercount: int  # the largest error of the counts of `top`, which may be too small


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Statistics of files: good and malformed rows, dense columns and slots."""

    schema: Schema  # the columns, with the scaling that was given for them
    rows: int
    bad_rows: int
    click_rate: float | None  # None for rows without labels
    numbers: tuple[NumberProfile, ...]
    slots: tuple[SlotProfile, ...]
    # whether percentiles are exact instead of those of a sample (`column_stats`)
    has_exact_percentiles: bool


def profile_files(
    files: Sequence[str], schema: Schema, *, format: str | None = None, bad_row_limit: int = 0
) -> Profile:
    """Returns the profile of files by a schema, whose scaling is ignored.

    Values are shown as their text if the format of the files has it, else as keys.

    Raises:
        DataError: If a file cannot be read, there are no rows, or only some files have labels.
        BadRowError: Names the malformed row that exceeded the limit.
    """
    bad_rows = BadRows(bad_row_limit)
    unscaled = tuple(DenseColumn(name=each.name, missing_indicator=True) for each in schema.dense)
    of_rows = replace(schema, dense=unscaled)
    reading = Reading([FileSplit(path) for path in files], of_rows, format, bad_rows)
    numbers = NumberStats(len(unscaled))
    slots = [_SlotStats(number) for number in schema.slot_numbers]
    clicks: float | None = None
    for _, block in reading.blocks():
        rows = block.rows
        values, is_missing = np.hsplit(rows.dense, 2)
        numbers.add(np.where(is_missing == 1, np.nan, values.astype(np.float64)))
        for index, slot in enumerate(slots):
            slot.add(select_slots(rows, (index,)))
        if rows.labels is not None:
            clicks = (clicks or 0.0) + float(rows.labels.sum())
    reading.end(numbers.rows)
    texts = ValueTexts(files, of_rows, format)
    return Profile(
        schema=schema,
        rows=numbers.rows,
        bad_rows=bad_rows.total,
        click_rate=None if clicks is None else clicks / numbers.rows,
        numbers=tuple(
            number_profile(numbers, index, column.name) for index, column in enumerate(unscaled)
        ),
        slots=tuple(
            SlotProfile(
                name=name,
                missing_rate=1 - slot.present / numbers.rows,
                num_distinct=slot.values.num_distinct,
                is_exact=slot.values.is_exact,
                top=_top(texts, name, slot.values.top(_NUM_TOP)),
                undercount=slot.values.undercount,
            )
            for name, slot in zip(schema.slots, slots, strict=True)
        ),
        has_exact_percentiles=numbers.is_exact,
    )


def schema_of(
    profile: Profile,  # of the training data
    # "none" and "log1p" standardise; "min_max" uses the minimum and the 95th percentile, as Paddle's
    # tutorials do, without clipping; "quantile" uses the percentiles 0, 5, ..., 100
    transform: Transform,
    *,
    missing_indicators: bool = False,  # whether to add indicators to columns with missing numbers
) -> Schema:
    """Returns a schema that scales the columns of a profile."""
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


class _SlotStats:
    """The values of a slot so far, and the number of rows that have one."""

    def __init__(self, number: int) -> None:
        self.values = ValueCounts()
        self.present = 0
        self._missing_key = np.uint64(key_of(number, ""))

    def add(self, rows: SlotKeys) -> None:
        is_there = rows.keys != self._missing_key
        self.values.add(rows.keys[is_there])
        before = np.concatenate([[0], np.cumsum(is_there)])[rows.offsets]  # [B + 1]
        self.present += int(np.count_nonzero(np.diff(before)))


def _top(
    texts: ValueTexts, name: str, top: Sequence[tuple[int, int]]
) -> tuple[tuple[str, int], ...]:
    """Returns the values with their counts: as text, or as keys if the files do not tell it."""
    found = texts.find(name, [key for key, _ in top])
    shown = {
        key: each[:_MAX_SHOWN] + "..." * (len(each) > _MAX_SHOWN) for key, each in found.items()
    }
    return tuple((shown.get(key, hex(key)), count) for key, count in top)


def profile_table(profile: Profile) -> Group:
    """Returns the output of `ps-data profile`."""
    slots = plain_table("slot", ("missing", "distinct"), "most frequent values")
    for slot in profile.slots:
        distinct = f"{'' if slot.is_exact else '~'}{slot.num_distinct:,}"
        top = "  ".join(f"{text} {count / profile.rows:.2%}" for text, count in slot.top)
        add_row(slots, slot.name, f"{slot.missing_rate:.2%}", distinct, top)
    clicks = "no labels" if profile.click_rate is None else f"click rate {profile.click_rate:.4f}"
    head = f"{counted(profile.rows, 'row', ',')}, {clicks}, {counted(profile.bad_rows, 'malformed row', ',')}"
    return Group(head, number_table(profile.numbers), slots, *_notes(profile))


def number_table(numbers: Iterable[NumberProfile]) -> Table:
    """Returns the statistics of dense columns, a line each."""
    table = plain_table("column", ("missing", "min", "max", "mean", "deviation", "95th"))
    for each in numbers:
        figures = (each.min, each.max, each.mean, each.deviation, each.percentile_95)
        shown = ["-" if each.missing_rate == 1 else f"{figure:,.6g}" for figure in figures]
        add_row(table, each.name, f"{each.missing_rate:.2%}", *shown)
    return table


def plain_table(name: str, figures: Sequence[str], *texts: str) -> Table:
    """Returns a table without rows: columns for names, for figures, and for texts, which may be long."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    for text in texts:
        table.add_column(text, overflow="fold")
    return table


def add_row(table: Table, *texts: str) -> None:
    """Adds a row of texts, which may be those of data."""
    table.add_row(*(Text(printable(text)) for text in texts))  # no markup: names may have brackets


def _notes(profile: Profile) -> list[str]:
    notes = []
    if not profile.has_exact_percentiles:
        notes.append(
            "95th: percentile of a sample of 131,072 rows; its rank has a standard error of 0.06 % (0.06 % "
            "/ sqrt(1 - missing) where numbers are missing)"
        )
    if not all(slot.is_exact for slot in profile.slots):
        worst = max(slot.undercount for slot in profile.slots) / profile.rows
        notes.append(
            f"~: estimated, standard error 0.81 %; shares in such slots may be up to {worst:.2%} too small"
        )
    return notes
