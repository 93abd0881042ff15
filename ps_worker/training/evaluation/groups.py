"""Figures of groups of examples, exactly: all examples are sorted, without bins.

AUC of a group: the share of pairs of a clicked and another example, by the product of their weights, in which
the clicked one has the higher prediction; ties count half:

    AUC = sum over clicks i of w_i (W(others below i) + W(others tied with i) / 2) / (W(clicks) W(others))

GAUC is the mean AUC of groups by weight, the number of examples if they are unweighted (Zhou et al., "Deep
Interest Network for Click-Through Rate Prediction", 2018). A group with one class has no AUC and is left out.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Figures of G groups, ascending by key."""

    keys: NDArray[np.uint64]  # uint64[G]
    examples: NDArray[np.int64]  # int64[G]
    weight: Floats  # float64[G], sums of weights
    clicks: Floats  # float64[G], sums of the weights of clicked examples
    predicted: Floats  # float64[G], weighted sums of predicted probabilities
    auc: Floats  # float64[G]; nan with one class only

    def without(self, key: np.uint64) -> "Groups":
        """Returns all groups except one."""
        is_other = self.keys != key
        return Groups(**{each.name: getattr(self, each.name)[is_other] for each in fields(self)})

    def gauc(self) -> float:
        """Returns the mean AUC of groups with both classes, by weight; nan without any."""
        has_auc = ~np.isnan(self.auc)
        weights = self.weight[has_auc]
        return float(np.average(self.auc[has_auc], weights=weights)) if weights.size else np.nan

    def most_frequent(self, number: int) -> list[dict[str, Any]]:
        """Returns the figures of the groups with the most examples, smaller keys first among equals."""
        order = np.lexsort((self.keys, -self.examples))[:number]
        return [
            {
                "key": str(self.keys[index]),  # JSON's numbers may lose digits of 64 bits
                "examples": int(self.examples[index]),
                "click_rate": ratio(self.clicks[index], self.weight[index]),
                "auc": float(self.auc[index]),
                "calibration": ratio(self.predicted[index], self.clicks[index]),
            }
            for index in order
        ]


def figures_of_groups(
    keys: NDArray[np.uint64],
    clicked: NDArray[np.bool_],
    probabilities: NDArray[np.float32],
    weights: NDArray[np.float32],
) -> Groups:
    """Returns the figures of the examples by key, uint64[N]; probabilities are those of a click."""
    size = keys.size
    order = np.lexsort((probabilities, keys))
    keys, probabilities = keys[order], probabilities[order]
    clicked, weights = clicked[order], weights[order]
    del order
    # From here on by ties, examples of one group with one prediction, of which there may be far fewer.
    is_new = keys[1:] != keys[:-1]
    is_new |= probabilities[1:] != probabilities[:-1]
    ties = _starts(is_new, keys.size)
    total, clicks = _sums(weights, ties), _sums(weights * clicked, ties)
    predicted = probabilities[ties] * total
    del probabilities, clicked, weights, is_new
    keys = keys[ties]
    starts = _starts(keys[1:] != keys[:-1], keys.size)
    ranked = clicks * _others_below(total - clicks, starts)
    examples = np.diff(ties[starts], append=size)
    total, clicks = _sums(total, starts), _sums(clicks, starts)
    pairs = clicks * (total - clicks)
    auc = np.full(starts.size, np.nan)
    np.divide(_sums(ranked, starts), pairs, out=auc, where=pairs > 0)
    return Groups(
        keys=keys[starts],
        examples=examples,
        weight=total,
        clicks=clicks,
        predicted=_sums(predicted, starts),
        auc=auc,
    )


def _starts(is_new: NDArray[np.bool_], size: int) -> NDArray[np.int64]:
    """Returns the starts of runs; `is_new[i]`: element i + 1 starts one."""
    return np.flatnonzero(np.concatenate([[size > 0], is_new])).astype(np.int64, copy=False)


def _sums(values: NDArray[Any], starts: NDArray[np.int64]) -> Floats:
    if not starts.size:
        return np.empty(0, np.float64)
    return np.add.reduceat(values, starts, dtype=np.float64)


def _others_below(others: Floats, starts: NDArray[np.int64]) -> Floats:
    """Returns for each tie the weight of others before it in its group, plus half of the others in it.

    `others` float64[T] are the weights of unclicked examples of each tie; `starts` is the first tie of each
    group.
    """
    below = np.cumsum(others)
    below -= others
    below -= np.repeat(below[starts], np.diff(starts, append=others.size))
    return below + others / 2


def ratio(value: float, total: float) -> float:
    """Returns value / total; nan for a total of 0."""
    return float(value / total) if total else np.nan
