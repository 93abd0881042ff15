"""What each column of a sample would be in a schema, and why: label, number, slot, or ignored.

Numbers measure, slots name. What a file does not say is told from its values: whole numbers are names if
there are few of them, or if they neither run up to a long tail like counts nor are all different.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_model.schema import DenseColumn, Schema, Transform
from protos.errors import UsageError, counted
from ps_worker.data.columnar.column_values import NUMBER as _NUMBER
from ps_worker.data.columnar.column_values import (
    is_list_type,
    is_number_type,
    is_slot_type,
    is_text_type,
    numbers,
)
from ps_worker.data.tools.profiling.number_stats import NumberStats
from ps_worker.data.tools.profiling.profile import number_profile, scaled
from ps_worker.data.tools.proposal.samples import Sample

USUAL_LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "clk", "target")

_FEW_VALUES = 100  # whole numbers with at most so many values are names, if each comes often enough
_ROWS_PER_VALUE = 20
_UNIQUE_SHARE = 0.95
_MIN_ROWS = 100  # below, values may be unique by chance
_LONG_TAIL = 6  # largest distance from the mean in standard deviations
_SHOWN = 5

_WHOLE = r"^-?(0|[1-9]\d*)$"  # other digits, as 007, would not be those of a number
_DATE = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}([ T].*)?$|^\d{1,2}:\d{2}(:\d{2}.*)?$"
_TIME_NAME = re.compile(
    r"(^|[^a-z])(ts|time|timestamp|date|datetime|day|hour|epoch|created|updated)([^a-z]|$)|_at$|time$|Time|Date"
)
_ID_NAME = re.compile(
    r"(^|[^a-z0-9])(id|ids|key|uuid|guid|index|idx|code|hash|no)$|[a-z]Id$|[a-z]ID$", re.IGNORECASE
)
_FIRST_TIME, _LAST_TIME = 946_684_800, 4_102_444_800  # the years 2000 to 2100, in seconds


@dataclass(frozen=True, slots=True)
class Number:
    """A dense column: how it is scaled, and why it is one."""

    column: DenseColumn
    why: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot: its name, and why it is one."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """A column that is left out: its name, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Label:
    """The label: its name, the share of clicks among the rows that have one, and that of rows without."""

    name: str
    click_rate: float
    missing_rate: float


Role = Number | Slot | Ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The roles of all columns.

    Attributes:
        label: None: no label was asked for, and none was found.
        numbers: In the order of the files.
        slots: In the order of the files.
        ignored: In the order of the files, then what cannot be used at all.
    """

    label: Label | None
    numbers: tuple[Number, ...] = ()
    slots: tuple[Slot, ...] = ()
    ignored: tuple[Ignored, ...] = field(default=())

    def schema(self) -> Schema:
        """Returns the schema of the proposal.

        Raises:
            UsageError: If no column is a slot.
        """
        if not self.slots:
            listed = "; ".join(f"{each.name!r}: {each.why}" for each in self.ignored)
            raise UsageError(
                f"no column can be a slot (text, whole numbers or lists of these), and models need one"
                f"{'; ignored are ' + listed if listed else ''}"
            )
        return Schema(
            dense=tuple(number.column for number in self.numbers),
            slots=tuple(slot.name for slot in self.slots),
            label=None if self.label is None else self.label.name,
        )


def propose(
    sample: Sample, *, label: str = "", ignore: Collection[str] = (), needs_label: bool = True
) -> Proposal:
    """Returns a role for each column of a sample.

    Args:
        sample: Of the training files.
        label: Name of the label's column; empty: a column of 0 and 1 with a usual name.
        ignore: Names of columns to leave out.
        needs_label: Whether a missing or ambiguous label is an error.

    Raises:
        UsageError: If a name does not exist, or the label is not clear; lists the candidates.
    """
    names = [*sample.columns, *sample.unusable]
    for name in [*([label] if label else []), *ignore]:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            hint = f", did you mean {nearest[0]!r}?" if nearest else ""
            raise UsageError(f"the files have no column {name!r}{hint}")
    if label in ignore and label:
        raise UsageError(f"--label and --ignore both name {label!r}: it cannot be both")
    candidates = {name: array for name, array in sample.columns.items() if name not in ignore}
    chosen = _label_of(candidates, label, needs_label=needs_label)
    roles: list[Role] = []
    for name, array in sample.columns.items():
        if name in ignore:
            roles.append(Ignored(name, "you asked for it (--ignore)"))
        elif chosen is None or name != chosen.name:
            roles.append(_role_of(name, array, is_text=sample.is_text))
    roles += [Ignored(name, why) for name, why in sample.unusable.items()]
    return _with_a_slot(
        Proposal(
            label=chosen,
            numbers=tuple(role for role in roles if isinstance(role, Number)),
            slots=tuple(role for role in roles if isinstance(role, Slot)),
            ignored=tuple(role for role in roles if isinstance(role, Ignored)),
        ),
        sample,
    )


def _label_of(columns: Mapping[str, pa.Array], name: str, *, needs_label: bool) -> Label | None:
    if name:
        array = columns.get(name, pa.nulls(0))
        found = _labels(array)
        if found is None:
            raise UsageError(
                f"--label: column {name!r} has the values {_values(array)}, expected 0 and 1"
            )
        return _label(name, found)
    usual = [column for column in columns if column.lower() in USUAL_LABELS]
    binary = {
        column: found for column in columns if (found := _labels(columns[column])) is not None
    }
    named = [column for column in usual if column in binary]
    if len(named) == 1:
        return _label(named[0], binary[named[0]])
    if not needs_label:
        return None
    if len(named) > 1:
        raise UsageError(
            f"the label may be {_or(named)}: say which with --label NAME, and leave the others out with "
            f"--ignore if they are known after the click alone"
        )
    unfit = [f"{column!r} has the values {_values(columns[column])}" for column in usual]
    fault = (
        f"{'; '.join(unfit)}, expected 0 and 1" if unfit else f"none is named {_or(USUAL_LABELS)}"
    )
    if binary:
        raise UsageError(
            f"no column is clearly the label ({fault}): say --label {_or(list(binary))}"
        )
    raise UsageError(f"no column is a label ({fault}), and no other has the values 0 and 1 alone")


def _label(name: str, labels: NDArray[np.float64]) -> Label:
    present = labels[~np.isnan(labels)]
    return Label(name, float(present.mean()), 1 - len(present) / len(labels))


def _labels(array: pa.Array) -> NDArray[np.float64] | None:
    """Returns the column as labels float64[N], nan where missing; None if there is another value, or none."""
    if not (is_number_type(array.type) or is_text_type(array.type)):
        return None
    labels = numbers(array)
    present = labels[~np.isnan(labels)]
    is_label = present.size > 0 and bool(np.isin(present, (0.0, 1.0)).all())
    return labels if is_label else None


def _role_of(name: str, array: pa.Array, *, is_text: bool) -> Role:
    kind = array.type
    if is_list_type(kind):
        return _role_of_lists(name, array)
    if array.null_count == len(array):
        return Ignored(name, "no value in the sampled rows")
    if not (is_slot_type(kind) or is_number_type(kind)):
        why = "a time: make features of it, as the hour or the day of the week"
        return Ignored(name, why if _is_time(kind) else f"of type {kind}, which no reader takes")
    if is_text_type(kind):
        return _role_of_text(name, array, is_csv=is_text)
    is_whole = pa.types.is_integer(kind)
    return _role_of_numbers(name, array, numbers(array), is_whole=is_whole)


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(kind))


def _role_of_lists(name: str, array: pa.Array) -> Role:
    if not is_slot_type(array.type):
        return Ignored(
            name, f"lists of {array.type.value_type}: a slot takes text or whole numbers"
        )
    values = array.flatten()
    if values.null_count == len(values):
        return Ignored(name, "no value in the sampled rows")
    return Slot(
        name, f"lists, {len(values) / len(array):.3g} values a row, {_distinct(values):,} distinct"
    )


def _role_of_text(name: str, array: pa.Array, *, is_csv: bool) -> Role:
    values = array.drop_null()
    distinct = _distinct(values)
    if distinct == 1 and not array.null_count:
        return Ignored(name, f"the same in every row: {_values(values)}")
    if _all_match(values, _DATE):
        return Ignored(name, "times: make features of them, as the hour or the day of the week")
    if is_csv and _all_match(values, _NUMBER):
        is_whole = _all_match(values, _WHOLE)
        return _role_of_numbers(name, array, numbers(array), is_whole=is_whole)
    if distinct >= _UNIQUE_SHARE * len(values) and len(values) >= _MIN_ROWS:
        return Ignored(
            name, f"different in nearly every row, like {_values(values[:1])}: nothing to learn"
        )
    why = f"text, {_distinct(values):,} distinct values"
    if is_csv and (other := _not_number(values)):
        why += f"; numbers but for {other}: leave those empty to have it scaled as a number"
    return Slot(name, why)


def _role_of_numbers(
    name: str, array: pa.Array, values: NDArray[np.float64], *, is_whole: bool
) -> Role:
    present = values[~np.isnan(values)]
    if not present.size:
        return Ignored(name, "no value in the sampled rows")
    if np.isinf(present).any():
        return Ignored(
            name, "has infinite numbers, whose rows are malformed: leave them empty to use it"
        )
    # Of whole numbers the values themselves: as float64 neighbours above 2^53 are equal.
    distinct = _distinct(array.drop_null()) if is_whole else len(np.unique(present))
    if distinct == 1 and (present.size == values.size or not is_whole):
        return Ignored(name, f"always {present[0]:g} where it is not missing")
    if is_whole:
        role = _role_of_whole_numbers(name, present, distinct)
        if role is not None:
            return role
    return _number(name, values, distinct)


def _role_of_whole_numbers(name: str, present: NDArray[np.float64], distinct: int) -> Role | None:
    """Returns the role of whole numbers that are names or times; None if they measure something."""
    if _TIME_NAME.search(name) and _are_times(present):
        return Ignored(
            name, "times since 1970: make features of them, as the hour or the day of the week"
        )
    is_id = _ID_NAME.search(name) is not None
    if distinct >= _UNIQUE_SHARE * present.size and present.size >= _MIN_ROWS:
        is_row_number = is_id or (np.diff(np.sort(present)) == 1).mean() > _UNIQUE_SHARE
        why = "different in nearly every row, like a row number: nothing to learn"
        return Ignored(name, why) if is_row_number else None
    why = ""
    if is_id:
        why = f"whole numbers, {distinct:,} distinct, that are names by the name of the column"
    elif distinct <= _FEW_VALUES and present.size >= _ROWS_PER_VALUE * distinct:
        why = f"whole numbers with only {counted(distinct, 'value')}"
    elif not _is_count(present) and present.size >= 2 * distinct:
        why = f"whole numbers, {distinct:,} distinct, spread evenly as those of names"
    return Slot(name, why) if why else None


def _are_times(present: NDArray[np.float64]) -> bool:
    """Whether all numbers are of the years 2000 to 2100, in seconds, milli-, micro- or nanoseconds."""
    return any(
        present.min() >= _FIRST_TIME * unit and present.max() <= _LAST_TIME * unit
        for unit in (1, 10**3, 10**6, 10**9)
    )


def _is_count(present: NDArray[np.float64]) -> bool:
    """Whether most of the numbers are small, for their range: half of them in its lowest quarter."""
    low, high = present.min(), present.max()
    return bool(np.median(present) < low + (high - low) / 4)


def _number(name: str, values: NDArray[np.float64], distinct: int) -> Number:
    stats = NumberStats(1)
    with np.errstate(over="ignore", invalid="ignore"):  # squares of huge numbers: logarithms do
        stats.add(values.reshape(-1, 1))
    profile = number_profile(stats, 0, name)
    spread = max(profile.max - profile.mean, profile.mean - profile.min)
    is_long = not np.isfinite(profile.deviation) or spread > _LONG_TAIL * profile.deviation
    transform: Transform = "log1p" if is_long else "none"
    has_missing = profile.missing_rate > 0
    column = replace(scaled(profile, transform), missing_indicator=has_missing)
    how = "logarithms, as the tail is long" if is_long else "standardised"
    missing = f", {profile.missing_rate:.1%} missing" if has_missing else ""
    return Number(
        column,
        f"numbers from {profile.min:g} to {profile.max:g}{missing}, {distinct:,} distinct; {how}",
    )


def _with_a_slot(proposal: Proposal, sample: Sample) -> Proposal:
    """Makes a slot of the number with the fewest values if there is none, as models need one."""
    if proposal.slots:
        return proposal
    fitting = [
        number
        for number in proposal.numbers
        if sample.is_text or pa.types.is_integer(sample.columns[number.column.name].type)
    ]
    if not fitting:
        return proposal
    chosen = min(fitting, key=lambda number: _distinct(sample.columns[number.column.name]))
    name = chosen.column.name
    slot = Slot(name, f"{chosen.why.partition(';')[0]}; a slot, as models need one")
    return replace(
        proposal,
        numbers=tuple(number for number in proposal.numbers if number is not chosen),
        slots=(slot,),
    )


def _all_match(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(_matches(values, pattern)).as_py())


def _not_number(values: pa.Array) -> str:
    """Returns a value that is no number in a column of which nearly all are numbers; "": another column."""
    is_number = _matches(values, _NUMBER)
    if pc.mean(pc.cast(is_number, pa.float64())).as_py() < _UNIQUE_SHARE:
        return ""
    return _values(values.filter(pc.invert(is_number))[:1])


def _matches(values: pa.Array, pattern: str) -> pa.Array:
    binary = values.cast(pa.large_binary())
    return pc.match_substring_regex(binary, pattern)


def _distinct(values: pa.Array) -> int:
    return int(pc.count_distinct(values).as_py())


def _values(array: pa.Array) -> str:
    """Returns the first distinct values for a message."""
    if len(array) == 0:
        return "none"
    found = list(dict.fromkeys(map(str, map(_readable, array[:10_000].to_pylist()))))
    return ", ".join(map(repr, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")


def _readable(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))
