"""What each column of a sample would be in a schema, and why: label, number, slot, or ignored.

Numbers measure, slots name. What a file does not say is told from its values: whole numbers are names if
there are few of them, or if they neither run up to a long tail like counts nor are all different.
"""

import fnmatch
import itertools
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.schema import DenseColumn, Schema, Transform
from ctr_ps.protos.errors import UsageError, counted, did_you_mean
from ctr_ps.ps_worker.data.columnar.column_values import (
    NUMBER,
    TIME_PARTS,
    WHOLE,
    is_list_type,
    is_number_type,
    is_slot_type,
    is_text_type,
    numbers,
    split_texts,
    times_in,
    with_times,
)
from ctr_ps.ps_worker.data.distinct_values import distinct_values
from ctr_ps.ps_worker.extras.data_tools.column_stats import NumberStats
from ctr_ps.ps_worker.extras.data_tools.labels import (
    LEAK,
    Label,
    first_values,
    follows_click,
    has_usual_name,
    label_of,
    labels_in,
    predicts_label,
)
from ctr_ps.ps_worker.extras.data_tools.profile import NumberProfile, number_profile, scaled
from ctr_ps.ps_worker.extras.data_tools.samples import Sample

AS_NAMES = "numbers taken as names, without an order"
_OTHER_LABEL = (
    "its name is that of a label: add it to the schema if it is known before the click and is "
    "no label"
)

_FEW_VALUES = 100  # whole numbers with at most so many values are names, if each comes often enough
_ROWS_PER_VALUE, _ROWS_PER_CODE = 10, 3
_UNIQUE_SHARE = 0.95
_MIN_ROWS = 100  # below, values may be unique by chance
_UNIQUE_ID = (
    "; different in nearly every sampled row: leave it out (--ignore) if it is an id of rows "
    "or requests"
)
_LONG_TAIL = 6  # largest distance from the mean in standard deviations

# Separators of lists, by the least share of the values that have them; the common ones occur in names, too.
_SEPARATORS = {"|": 0.3, "^": 0.3, ";": 0.5, ",": 0.5, " ": 0.5}
_COMMON_SEPARATORS = ";, "

_NUMBERS = r"^\[?[-+\d.eE]+([,;| ] *[-+\d.eE]+)+\]?$"  # lists of them in text
_DIGITS = r"^\d+$"  # with leading zeros, as 007, those of a name
_ID_NAME = re.compile(
    r"(?i:(^|[^a-z0-9])(id|ids|key|uuid|guid|index|idx|code|hash|no)$)|[a-z]I[dD]s?$"
    # In one case, where other words end alike: bid, paid.
    r"|(?i:(^|[^a-z])(u|p|c|g|s|user|member|customer|visitor|cookie|device|session|query|request|item|goods"
    r"|product|sku|article|video|page|site|app|ad|adgroup|campaign|creative|advertiser|publisher|shop|seller"
    r"|brand|cat|cate|category|city|region)ids?$)"
)

_TIME_NAME = re.compile(
    r"(?i:(^|[^a-z])(ts|dt|ds|time|timestamp|date|datetime|day|hour|epoch|created|updated)([^a-z]|$))"
    r"|(?i:_at$|time$)|Time|Date|Day|Hour"
)
_DATE = r"^\d{4}[-/]\d{1,2}[-/]\d{1,2}([ T].*)?$|^\d{1,2}:\d{2}(:\d{2}.*)?$"
# YYYYMMDD or YYMMDD, then HH, MM and SS or fewer; a number lacks the zero of the years before 2010.
_TIME_DIGITS = (
    r"^(\d{1,2}|(19|20)\d\d)(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])"
    r"(([01]\d|2[0-3])([0-5]\d([0-5]\d)?)?)?$"
)
_MAX_TIME = 10**14
_FIRST, _LAST = 946_684_800, 4_102_444_800  # the years 2000 to 2100, in seconds
_UNITS = (1, 10**3, 10**6, 10**9)  # seconds, milli-, micro- and nanoseconds
_MOST_TIMES = 0.8  # the others may be a word or a number for unknown times

_REMEDY = "make features of them, such as the hour or the day of the week"


@dataclass(frozen=True, slots=True)
class Role:
    """What a column is, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Number(Role):
    """A dense column: how it is scaled, and its statistics in the sample."""

    column: DenseColumn
    profile: NumberProfile


@dataclass(frozen=True, slots=True)
class Slot(Role):
    """A slot."""

    separator: str = ""  # of lists in its text; "": each text is one value


@dataclass(frozen=True, slots=True)
class Vector(Role):
    """Lists of so many numbers, which are dense columns as they are."""

    width: int


class Ignored(Role):
    """A column that is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The roles of all columns."""

    label: Label | None  # None: no label was asked for, and none was found
    no_label: str = ""  # why there is no label, with the candidates; "" if there is one
    numbers: tuple[Number, ...] = ()  # in the order of the files, as slots are
    vectors: tuple[Vector, ...] = ()
    slots: tuple[Slot, ...] = ()
    ignored: tuple[Ignored, ...] = ()  # likewise, then what cannot be used at all
    # names of the ignored columns that predict the label almost perfectly
    leaks: tuple[str, ...] = ()

    def schema(self) -> Schema:
        """Returns the schema of the proposal; raises UsageError if no column is a slot."""
        if not self.slots:
            listed = "; ".join(f"{each.name!r}: {each.why}" for each in self.ignored)
            raise UsageError(
                "no column can be a slot (text, whole numbers or lists of these), but models need "
                f"one{'; ignored are ' + listed if listed else ''}: write a schema by hand "
                "(docs/schema.md)"
            )
        widths = [{"name": vector.name, "width": vector.width} for vector in self.vectors]
        vectors = itertools.chain(*map(DenseColumn.list_from_dict, widths))
        return Schema(
            dense=(*(number.column for number in self.numbers), *vectors),
            slots=tuple(slot.name for slot in self.slots),
            split={slot.name: slot.separator for slot in self.slots if slot.separator},
            label=None if self.label is None else self.label.name,
        )


def propose(
    sample: Sample,
    *,
    label: str = "",
    ignore: Collection[str] = (),
    slots: Collection[str] = (),  # names, or patterns with *, of columns to take as slots
    numbers: Collection[str] = (),  # likewise, as numbers
    needs_label: bool = True,
) -> Proposal:
    """Returns a role for each column of a sample of the training files.

    Without `label` it is a column of 0 and 1 with a usual name. Raises UsageError if a name does not exist, a
    column cannot be what it is to be, or, if `needs_label`, the label is missing or ambiguous; lists the
    candidates.
    """
    fields = pa.schema([(name, array.type) for name, array in sample.columns.items()])
    if source := times_in([label], fields).get(label):
        batch = pa.RecordBatch.from_pydict({source: sample.columns[source]})
        columns = {**sample.columns, label: with_times(batch, {label: source}).column(label)}
        del columns[source]
        unusable = {**sample.unusable, source: "the label comes from it"}
        sample = replace(sample, columns=columns, unusable=unusable)
    _require_columns([*sample.columns, *sample.unusable], [label, *ignore], [*slots, *numbers])
    if label in ignore and label:
        raise UsageError(f"label and ignore both name {label!r}: it cannot be both")
    candidates = {name: array for name, array in sample.columns.items() if name not in ignore}
    chosen, no_label = None, ""
    try:
        chosen = label_of(candidates, sample.unusable, label)
    except UsageError as error:
        if needs_label or label:
            raise
        no_label = str(error)
    labels = None if chosen is None else labels_in(sample.columns[chosen.name])
    roles: list[Role] = []
    leaks: list[str] = []
    for name, array in sample.columns.items():
        if name in ignore:
            roles.append(Ignored(name, "left out by `ignore`"))
        elif chosen is not None and name == chosen.name:
            continue
        elif (is_slot := _matches_any(name, slots)) or _matches_any(name, numbers):
            roles.append(_role_as_told(name, array, sample, is_slot=is_slot))
        elif has_usual_name(name):
            roles.append(Ignored(name, _OTHER_LABEL))
        elif follows_click(name):
            roles.append(Ignored(name, _why_after_click(name, array, chosen)))
        else:
            role = _role_of(name, array, sample)
            if (
                labels is not None
                and not isinstance(role, Ignored)
                and predicts_label(array, labels, is_number=isinstance(role, Number | Vector))
            ):
                leaks.append(name)
                role = Ignored(name, f"{LEAK} ({role.why})")
            roles.append(role)
    roles += [Ignored(name, why) for name, why in sample.unusable.items()]
    proposal = Proposal(
        label=chosen,
        no_label=no_label,
        numbers=tuple(role for role in roles if isinstance(role, Number)),
        vectors=tuple(role for role in roles if isinstance(role, Vector)),
        slots=tuple(role for role in roles if isinstance(role, Slot)),
        ignored=tuple(role for role in roles if isinstance(role, Ignored)),
        leaks=tuple(leaks),
    )
    return _with_a_slot(proposal, sample)


def _matches_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _require_columns(names: list[str], wanted: list[str], patterns: list[str]) -> None:
    for name in filter(None, wanted):
        if name not in names:
            raise UsageError(f"there is no column {name!r}{did_you_mean(name, names)}")
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"no column matches {pattern!r}{did_you_mean(pattern, names)}")


def _role_as_told(name: str, array: pa.Array, sample: Sample, *, is_slot: bool) -> Role:
    role = _role_of(name, array, sample)
    if isinstance(role, Slot if is_slot else Number):
        return role
    if is_slot and is_slot_type(array.type):
        return Slot(name, f"as --slots says; {role.why}")
    if is_number_type(array.type) or (sample.is_text and not is_slot):
        values = numbers(array)
        if not is_slot and not np.isinf(values).any():
            return _number(name, values, _distinct(array))
    what = "slot" if is_slot else "number"
    raise UsageError(f"column {name!r} cannot be a {what}, it is of type {array.type}: {role.why}")


def _why_after_click(name: str, array: pa.Array, label: Label | None) -> str:
    why = "its name is that of an event after a click"
    if label is not None and labels_in(array) is not None:
        why += (
            f", with 0 and 1: to learn it as a second label, set labels = [{json.dumps(label.name)}, "
            f"{json.dumps(name)}] and model esmm or mmoe"
        )
    return f"{why}; add it to the schema if it is known before the click"


def _role_of(name: str, array: pa.Array, sample: Sample) -> Role:
    kind = array.type
    if is_list_type(kind):
        return _role_of_lists(name, array)
    if array.null_count == len(array):
        return Ignored(name, "no value in the sampled rows")
    if not (is_slot_type(kind) or is_number_type(kind)):
        if parts := times_in([f"{name}.{part}" for part in TIME_PARTS], pa.schema([(name, kind)])):
            return Ignored(name, f"a time: {_advice(parts)}")
        why = f"of type {kind}, which no reader supports"
        return Ignored(name, f"a time: {_REMEDY}" if pa.types.is_temporal(kind) else why)
    if is_text_type(kind):
        return _role_of_text(name, array, sample)
    return _role_of_numbers(name, array, sample, is_whole=pa.types.is_integer(kind))


def _role_of_lists(name: str, array: pa.Array) -> Role:
    values = array.flatten()
    lengths = pc.unique(pc.list_value_length(array).drop_null())
    if not is_slot_type(array.type):
        is_vector = is_number_type(values.type) and len(lengths) == 1 and lengths[0].as_py() > 0
        if is_vector and np.isfinite(numbers(values.drop_null())).all():
            return Vector(name, f"lists of {lengths[0]} numbers, not scaled", lengths[0].as_py())
        return Ignored(
            name,
            f"lists of {values.type}: a slot takes text or whole numbers, dense columns lists of one length",
        )
    if values.null_count == len(values):
        return Ignored(name, "no value in the sampled rows")
    why = f"lists, {len(values) / len(array):.3g} values a row, {_distinct(values):,} distinct"
    if len(lengths) == 1 and lengths[0].as_py() > 1 and pa.types.is_integer(values.type):
        why += f"; {AS_NAMES}: for a vector write decimal numbers"
    return Slot(name, why)


def _role_of_text(name: str, array: pa.Array, sample: Sample) -> Role:
    values = array.drop_null()
    distinct = _distinct(values)
    if distinct == 1 and not array.null_count:
        return Ignored(name, f"the same in every row: {first_values(values)}")
    if why := why_text_is_time(name, values):
        return Ignored(name, why)
    is_whole = _all_match(values, WHOLE)
    is_padded = not is_whole and _all_match(values, _DIGITS)
    has_numbers = _all_match(values, _NUMBERS)
    if not is_padded and _all_match(values, NUMBER):
        role = _role_of_numbers(name, array, sample, is_whole=is_whole)
        if sample.is_text:
            return role
        has_numbers = isinstance(role, Number)
    separator, share = _separator_of(values)
    if separator:
        role = _role_of_lists(name, split_texts(array, separator))
        why = f"{separator!r} in {share:.0%} of its values, so text of {role.why}"
        return Slot(name, why, separator)
    is_unique = distinct >= _UNIQUE_SHARE * len(values) and len(values) >= _MIN_ROWS
    if is_unique and (sample.is_complete or not _is_id(name)):
        return Ignored(
            name,
            f"different in nearly every row, like {first_values(values[:1])}: nothing to learn",
        )
    why = f"{'digits with leading zeros' if is_padded else 'text'}, {distinct:,} distinct values"
    if sample.is_text and not is_padded and (other := _not_number(values)):
        why += f"; numbers except {other}: to have it scaled as a number, leave those empty"
    if has_numbers:
        why += f"; {AS_NAMES}: for numbers write them as such, not as text"
    return Slot(name, f"{why}{_UNIQUE_ID if is_unique else ''}")


def _separator_of(values: pa.Array) -> tuple[str, float]:
    """Returns the separator of lists in most of the texts, and the share that has it; ("", 0.0): of none.

    What separates words or fields is none: pieces that begin with a blank, or are more than the texts.
    """
    texts = values.cast(pa.large_binary())
    # A list or an object of JSON would keep its brackets.
    if pc.any(pc.match_substring_regex(texts, r"^\s*[\[{(]")).as_py():
        return "", 0.0
    for separator, least in _SEPARATORS.items():
        share = pc.mean(pc.cast(pc.match_substring(texts, separator), pa.float64())).as_py()
        if share < least:
            continue
        pieces = pc.unique(split_texts(texts, separator).flatten())
        is_common = separator in _COMMON_SEPARATORS
        num_blanks = pc.sum(pc.starts_with(pieces, " ")).as_py() or 0
        if len(pieces) > 5 * num_blanks and not (is_common and len(pieces) >= _distinct(values)):
            return separator, share
    return "", 0.0


def _role_of_numbers(name: str, array: pa.Array, sample: Sample, *, is_whole: bool) -> Role:
    values = numbers(array)
    present = values[~np.isnan(values)]
    # Of whole numbers the values themselves: as float64 neighbours above 2^53 are equal.
    distinct = _distinct(array) if is_whole else len(np.unique(present))
    has_missing = present.size < values.size
    if not present.size:
        why = "no value in the sampled rows"
    elif np.isinf(present).any():
        why = "has infinite numbers, which make rows malformed: leave them empty to use the column"
    elif distinct == 1 and not (is_whole and has_missing):  # of a name, none may say something
        why = f"always {present[0]:g} where it is not missing"
    else:
        why = why_numbers_are_times(name, present)
    if why:
        return Ignored(name, why)
    if is_whole:
        role = _role_of_whole_numbers(name, present, distinct, sample)
        if role is not None:
            return role
    elif _is_id(name) and (present == np.floor(present)).all():
        form = first_values(array.drop_null()[:1])
        return Ignored(
            name, f"an id by its name, but a slot cannot read {form}: write it as integers or text"
        )
    return _number(name, values, distinct)


def _role_of_whole_numbers(
    name: str, present: NDArray[np.float64], distinct: int, sample: Sample
) -> Role | None:
    """Returns the role of whole numbers that are names; None if they measure something."""
    is_id = _is_id(name)
    is_unique = distinct >= _UNIQUE_SHARE * present.size and present.size >= _MIN_ROWS
    if is_unique and not (is_id and not sample.is_complete and not _are_in_sequence(present)):
        is_row_number = is_id or _are_in_sequence(np.sort(present))
        why = "different in nearly every row, like a row number: nothing to learn"
        return Ignored(name, why) if is_row_number else None
    why = ""
    if is_id:
        why = (
            f"whole numbers, {distinct:,} distinct, read as ids because of the column's "
            f"name{_UNIQUE_ID if is_unique else ''}"
        )
    elif distinct <= _FEW_VALUES and present.size >= _ROWS_PER_VALUE * distinct:
        why = f"whole numbers with only {counted(distinct, 'value')}"
    elif (
        present.min() in (0, 1)
        and distinct == present.max() - present.min() + 1
        and present.size >= _ROWS_PER_CODE * distinct
    ):
        why = f"whole numbers, all from {present.min():g} to {present.max():g}, like codes"
    elif not _is_count(present) and present.size >= 2 * distinct:
        why = f"whole numbers, {distinct:,} distinct, spread evenly like ids"
    return Slot(name, why) if why else None


def _is_id(name: str) -> bool:
    return _ID_NAME.search(name) is not None


def _are_in_sequence(present: NDArray[np.float64]) -> bool:
    """Whether nearly every number is the one before plus 1."""
    return bool((np.diff(present) == 1).mean() > _UNIQUE_SHARE)


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
    why = f"numbers from {profile.min:g} to {profile.max:g}{missing}, {distinct:,} distinct; {how}"
    return Number(name, why, column, profile)


def _with_a_slot(proposal: Proposal, sample: Sample) -> Proposal:
    """Makes a slot of the number with the fewest values if there is none, as models need one."""
    if proposal.slots:
        return proposal
    fitting = [
        number
        for number in proposal.numbers
        if sample.is_text or pa.types.is_integer(sample.columns[number.name].type)
    ]
    if not fitting:
        return proposal
    chosen = min(fitting, key=lambda number: _distinct(sample.columns[number.name]))
    name = chosen.name
    slot = Slot(name, f"{chosen.why.partition(';')[0]}; used as a slot, as models need one")
    return replace(
        proposal,
        numbers=tuple(number for number in proposal.numbers if number is not chosen),
        slots=(slot,),
    )


def _all_match(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(_matches(values, pattern)).as_py())


def _not_number(values: pa.Array) -> str:
    """Returns a value that is no number in a column of which nearly all are numbers; "": another column."""
    is_number = _matches(values, NUMBER)
    if pc.mean(pc.cast(is_number, pa.float64())).as_py() < _UNIQUE_SHARE:
        return ""
    return first_values(values.filter(pc.invert(is_number))[:1])


def _matches(values: pa.Array, pattern: str) -> pa.Array:
    binary = values.cast(pa.large_binary())
    return pc.match_substring_regex(binary, pattern)


def _distinct(values: pa.Array) -> int:
    return len(distinct_values(values.drop_null()))


def _advice(parts: Collection[str]) -> str:
    return f"as slots add {' and '.join(map(json.dumps, parts))}"


def why_text_is_time(name: str, values: pa.Array) -> str:
    """Returns the reason to leave out a column of text without nulls; "": most of its values are no times.

    Digits are times only if its name says so.
    """
    is_date = pc.match_substring_regex(values.cast(pa.large_binary()), _DATE)
    if pc.mean(pc.cast(is_date, pa.float64())).as_py() >= _MOST_TIMES:
        parts = {f"{name}.{part}": name for part in TIME_PARTS}
        read = with_times(pa.RecordBatch.from_pydict({name: values[:100]}), parts)
        is_read = pc.all(pc.greater_equal(read.column(f"{name}.hour"), 0)).as_py()
        return f"times: {_advice(parts) if is_read else _REMEDY}"
    return why_numbers_are_times(name, numbers(values)) if _TIME_NAME.search(name) else ""


def why_numbers_are_times(name: str, present: NDArray[np.float64]) -> str:
    """Returns the reason to leave out a column of numbers; "": its name or most of them are not of times."""
    if not _TIME_NAME.search(name):
        return ""
    whole = present[(present >= 1) & (present < _MAX_TIME) & (present == np.floor(present))]
    digits = pa.array(whole.astype(np.int64)).cast(pa.string())
    num_times = pc.sum(pc.match_substring_regex(digits, _TIME_DIGITS)).as_py() or 0
    if num_times >= _MOST_TIMES * present.size:
        return f"times as digits, such as {digits[0]}: {_REMEDY}"
    for unit in _UNITS:
        if ((present >= _FIRST * unit) & (present <= _LAST * unit)).mean() >= _MOST_TIMES:
            return f"times since 1970: {_REMEDY}"
    return ""
