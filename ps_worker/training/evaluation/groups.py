"""Figures of groups of examples, exactly: all examples are sorted, nothing is binned.

AUC of a group: the share of pairs of a clicked and another example, by the product of their weights, in which
the clicked one has the higher prediction; ties count half:

    AUC = sum over clicks i of w_i (W(others below i) + W(others tied with i) / 2) / (W(clicks) W(others))

GAUC is the mean of the AUC of groups, by their weight, which without sample weights is the number of their
examples (Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018). A group with one
class has no AUC and is left out.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Figures of G groups, ascending by key.

    Attributes:
        keys: uint64[G].
        examples: int64[G].
        weight: float64[G], sums of the weights of the examples.
        clicks: float64[G], sums of the weights of clicked examples.
        predicted: float64[G], sums of predicted probabilities, each times its weight.
        auc: float64[G]; nan with one class only.
    """

    keys: NDArray[np.uint64]
    examples: NDArray[np.int64]
    weight: Floats
    clicks: Floats
    predicted: Floats
    auc: Floats

    def without(self, key: np.uint64) -> "Groups":
        """Returns all groups but that of a key."""
        is_other = self.keys != key
        return Groups(**{each.name: getattr(self, each.name)[is_other] for each in fields(self)})

    def gauc(self) -> float:
        """Returns the mean AUC of groups with both classes, by weight; nan without such groups."""
        has_auc = ~np.isnan(self.auc)
        weights = self.weight[has_auc]
        return float(np.average(self.auc[has_auc], weights=weights)) if weights.size else np.nan

    def most_frequent(self, number: int) -> list[dict[str, Any]]:
        """Returns the figures of the groups with the most examples, of equal ones the smaller key first."""
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
    """Returns the figures of the examples with each key.

    Args:
        keys: uint64[N], of the group of each example.
        clicked: bool[N].
        probabilities: float32[N], of a click.
        weights: float32[N].
    """
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
    """Returns where runs begin: `is_new[i]` says that element i + 1 begins one."""
    return np.flatnonzero(np.concatenate([[size > 0], is_new])).astype(np.int64, copy=False)


def _sums(values: NDArray[Any], starts: NDArray[np.int64]) -> Floats:
    """Returns the sums of the stretches that begin at `starts`."""
    if not starts.size:
        return np.empty(0, np.float64)
    return np.add.reduceat(values, starts, dtype=np.float64)


def _others_below(others: Floats, starts: NDArray[np.int64]) -> Floats:
    """Returns for each tie the weight of others before it in its group, and half of those in it.

    Args:
        others: float64[T], weight of the examples of a tie that were not clicked.
        starts: First tie of each group.
    """
    below = np.cumsum(others)
    below -= others
    below -= np.repeat(below[starts], np.diff(starts, append=others.size))
    return below + others / 2


def ratio(value: float, total: float) -> float:
    """Returns value / total; nan without a total."""
    return float(value / total) if total else np.nan
