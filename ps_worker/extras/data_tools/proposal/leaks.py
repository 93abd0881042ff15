"""Columns that tell the label alone, as those do that are known after the click only.

Two signs: an AUC of nearly 1, and values beside the commonest one that clicked rows alone have, as the price
of a purchase, which most clicks are without.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ctr_ps.ctr_model.metrics import auc_of_histograms
from ctr_ps.ps_worker.data.columnar.column_values import is_list_type, numbers

LEAK = "predicts the label almost perfectly: is it known only after the click?"

_AUC = 0.98
_MIN_ROWS = 20  # of each class, for an AUC
_CLICK_RATE = 0.99  # of the rows that are said to be clicked ones
_MAX_BASE_RATE = 0.9
_MIN_EVIDENCE = 20.0  # -log of the probability that so many rows are clicks by chance
_SEED = 1


def predicts_label(array: pa.Array, labels: NDArray[np.float64], *, is_number: bool) -> bool:
    """Whether a column predicts the label almost perfectly.

    Args:
        array: The column: text, numbers, or lists, of which the lengths count.
        labels: float64[N], 0, 1, or nan where missing.
        is_number: Whether numbers are ordered, else they are names like text.
    """
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
