"""The label among the columns of a sample, and columns that tell it alone, known after the click only.

Two signs of the latter: an AUC of nearly 1, and values beside the commonest one that clicked rows alone have,
as the price of a purchase, which most clicks are without.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.metrics import auc_of_histograms
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.data.columnar.column_matching import LABEL_NAMES
from ctr_ps.ps_worker.data.columnar.column_values import (
    flat,
    is_list_type,
    is_number_type,
    is_text_type,
    numbers,
)

LEAK = "predicts the label almost perfectly: is it known only after the click?"

_SHOWN = 5
_AUC = 0.98
_MIN_ROWS = 20  # of each class, for an AUC
_CLICK_RATE = 0.99  # of the rows that are said to be clicked ones
_MAX_BASE_RATE = 0.9
_MIN_EVIDENCE = 20.0  # -log of the probability that so many rows are clicks by chance
_MAX_NUMBERS = 4_000_000  # of a vector, that are looked at
_SEED = 1
_AFTER_CLICK = re.compile(
    r"(is_?|has_?|did_?)?(purchase|conversion|convert|cvr|buy|bought|pay|paid|payment|order|cart"
    r"|add_?to_?cart|like|finish|favou?rite)(e?d|s)?(_?label|_?flag)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Label:
    """The label: its name, the share of clicks among the rows that have one, and that of rows without."""

    name: str
    click_rate: float
    missing_rate: float


_CHOOSE = "choose by --label NAME, in Python by label="


def label_of(columns: Mapping[str, pa.Array], unusable: Mapping[str, str], name: str) -> Label:
    """Returns the label: the column of a name, or, of none, a column of 0 and 1 with a usual name.

    `unusable` are the reasons why other columns have no values here, by name. Raises UsageError if the label
    is not clear; lists the candidates.
    """
    if name:
        if name in unusable:
            raise UsageError(f"label: column {name!r} is not usable: {unusable[name]}")
        found = labels_in(columns[name])
        if found is None:
            raise UsageError(
                f"label: column {name!r} has the values {first_values(columns[name])}, expected 0 and 1, "
                f"which --label '{name} >= N' makes of numbers"
            )
        return _label(name, found)
    usual = [column for column in columns if has_usual_name(column)]
    binary = {
        column: found for column in columns if (found := labels_in(columns[column])) is not None
    }
    named = [column for column in usual if column in binary]
    if len(named) == 1:
        return _label(named[0], binary[named[0]])
    if len(named) > 1:
        raise UsageError(f"the label may be {_one_of(named)}: {_CHOOSE}")
    unfit = [f"{column!r} has the values {first_values(columns[column])}" for column in usual]
    fault = (
        f"{'; '.join(unfit)}, expected 0 and 1, which --label 'NAME >= N' makes of numbers"
        if unfit
        else f"none is named {_one_of(LABEL_NAMES)}"
    )
    if binary:
        raise UsageError(
            f"no column is clearly the label ({fault}); it may be {_one_of(list(binary))}: {_CHOOSE}"
        )
    raise UsageError(f"no column is a label ({fault}), and no other has only the values 0 and 1")


def has_usual_name(column: str) -> bool:
    """Whether a column is named as labels are."""
    return column.lower() in LABEL_NAMES


def follows_click(column: str) -> bool:
    """Whether a column is named as what is known after a click only: a purchase, an order, a favorite."""
    return _AFTER_CLICK.fullmatch(column) is not None


def labels_in(array: pa.Array) -> NDArray[np.float64] | None:
    """Returns the column as labels float64[N], nan where missing; None if there is another value, or none."""
    if not (is_number_type(array.type) or is_text_type(array.type)):
        return None
    labels = numbers(array)
    present = labels[~np.isnan(labels)]
    is_label = present.size > 0 and bool(np.isin(present, (0.0, 1.0)).all())
    return labels if is_label else None


def _label(name: str, labels: NDArray[np.float64]) -> Label:
    present = labels[~np.isnan(labels)]
    return Label(name, float(present.mean()), 1 - len(present) / len(labels))


def first_values(array: pa.Array) -> str:
    """Returns the first distinct values."""
    if len(array) == 0:
        return "none"
    values = dict.fromkeys(
        value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
        for value in array[:10_000].to_pylist()
    )
    found = [*values]
    return ", ".join(map(repr, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")


def _one_of(names: Sequence[str]) -> str:
    """Returns the names as in "'a', 'b' or 'c'"."""
    return " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def predicts_label(array: pa.Array, labels: NDArray[np.float64], *, is_number: bool) -> bool:
    """Whether a column predicts the label almost perfectly; of lists the lengths count.

    `labels` float64[N] are 0, 1, or nan where missing. Unless `is_number`, values are names without an order;
    lists of numbers are vectors, whose numbers are looked at one by one.
    """
    if is_number and is_list_type(array.type):
        width = pc.max(pc.list_value_length(array)).as_py()
        step = -(-len(array) * width // _MAX_NUMBERS)
        parts = flat(pa.table({"v": array[::step]}), {"v": width}).columns[1:]
        return any(predicts_label(part, labels[::step], is_number=True) for part in parts)
    is_labelled = ~np.isnan(labels)
    clicked = labels[is_labelled] == 1
    if is_list_type(array.type):
        array, is_number = pc.list_value_length(array), True
    if is_number:
        values = numbers(array)[is_labelled]
        is_missing = np.isnan(values)
        codes = np.unique(values, return_inverse=True)[1]
        aucs = [
            _auc(codes[~is_missing], clicked[~is_missing]),
            _auc(is_missing.astype(np.int64), clicked),
        ]
    else:
        codes = array.dictionary_encode(null_encoding="encode").indices.to_numpy()[is_labelled]
        aucs = [_auc_of_names(codes, clicked)]
    return any(max(auc, 1 - auc) >= _AUC for auc in aucs) or _are_clicks_alone(codes, clicked)


def _auc(codes: NDArray[np.int64], clicked: NDArray[np.bool_]) -> float:
    """Returns the AUC of predictions int64[N] from 0; 0.5 if a class has few rows."""
    num_clicks = np.count_nonzero(clicked)
    if min(num_clicks, clicked.size - num_clicks) < _MIN_ROWS:
        return 0.5
    size = int(codes.max()) + 1
    return auc_of_histograms(
        np.bincount(codes[clicked], minlength=size), np.bincount(codes[~clicked], minlength=size)
    )


def _auc_of_names(codes: NDArray[np.int64], clicked: NDArray[np.bool_]) -> float:
    """Returns the AUC of click rates by name, of one half of the rows for the other."""
    is_known = np.random.default_rng(_SEED).random(codes.size) < 0.5
    size = int(codes.max(initial=0)) + 1
    rows = np.bincount(codes[is_known], minlength=size)
    clicks = np.bincount(codes[is_known], clicked[is_known], minlength=size)
    rates = (clicks + clicked.mean()) / (rows + 1)  # an unknown name has the mean
    ranks = np.unique(rates, return_inverse=True)[1]
    return _auc(ranks[codes[~is_known]], clicked[~is_known])


def _are_clicks_alone(codes: NDArray[np.int64], clicked: NDArray[np.bool_]) -> bool:
    """Whether nearly all rows that do not have the commonest value are clicked, and not by chance."""
    others = clicked[codes != np.bincount(codes).argmax()]
    base_rate = float(clicked.mean())
    if not others.size or others.mean() < _CLICK_RATE or base_rate > _MAX_BASE_RATE:
        return False
    evidence: float = others.size * -math.log(base_rate)
    return evidence >= _MIN_EVIDENCE
