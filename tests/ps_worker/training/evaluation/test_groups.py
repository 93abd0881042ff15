"""Figures of groups, against scikit-learn and against sums over each group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ctr_ps.ps_worker.training.evaluation.groups import figures_of_groups

# Few distinct predictions, so that there are ties within groups and over their borders.
EXAMPLES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 7, 2**64 - 1]),
        st.booleans(),
        st.sampled_from([0.1, 0.25, 0.5, 0.9]),
        st.sampled_from([0.5, 1.0, 3.0]),
    ),
    max_size=60,
)


def arrays(rows) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return (
        np.array([row[0] for row in rows], np.uint64),
        np.array([row[1] for row in rows], bool),
        np.array([row[2] for row in rows], np.float32),
        np.array([row[3] for row in rows], np.float32),
    )


def auc_of(clicked: np.ndarray, probabilities: np.ndarray, weights: np.ndarray) -> float:
    has_both = len(set(clicked)) == 2
    return roc_auc_score(clicked, probabilities, sample_weight=weights) if has_both else math.nan


def ones(array: np.ndarray) -> np.ndarray:
    return np.ones(array.size, np.float32)


@given(EXAMPLES)
def test_figures_are_those_of_each_group_alone(rows) -> None:
    keys, clicked, probabilities, weights = arrays(rows)

    groups = figures_of_groups(keys, clicked, probabilities, weights)

    assert groups.keys.tolist() == sorted(set(keys.tolist()))
    for index, key in enumerate(groups.keys):
        rows_of = keys == key
        assert groups.examples[index] == rows_of.sum()
        assert groups.weight[index] == weights[rows_of].sum()
        assert groups.clicks[index] == weights[rows_of & clicked].sum()
        predicted = (weights[rows_of] * probabilities[rows_of]).sum()
        assert groups.predicted[index] == pytest.approx(predicted, rel=1e-6)
        expected = auc_of(clicked[rows_of], probabilities[rows_of], weights[rows_of])
        assert groups.auc[index] == pytest.approx(expected, nan_ok=True)


@given(EXAMPLES)
def test_gauc_weighs_groups_by_their_weight(rows) -> None:
    keys, clicked, probabilities, weights = arrays(rows)
    total = weight = 0.0
    for key in set(keys.tolist()):
        rows_of = keys == np.uint64(key)
        auc = auc_of(clicked[rows_of], probabilities[rows_of], weights[rows_of])
        if not math.isnan(auc):
            total += auc * weights[rows_of].sum()
            weight += weights[rows_of].sum()

    gauc = figures_of_groups(keys, clicked, probabilities, weights).gauc()

    assert gauc == pytest.approx(total / weight if weight else math.nan, nan_ok=True)


def test_most_frequent_come_first() -> None:
    keys = np.array([5, 5, 9, 7, 7, 7, 9], np.uint64)
    clicked = np.array([1, 0, 0, 1, 1, 0, 0], bool)
    probabilities = np.float32([0.6, 0.2, 0.5, 0.9, 0.3, 0.4, 0.5])

    groups = figures_of_groups(keys, clicked, probabilities, ones(keys))
    first, second, third = groups.most_frequent(3)

    assert [each["key"] for each in (first, second, third)] == ["7", "5", "9"]
    assert first == {
        "key": "7",
        "examples": 3,
        "click_rate": pytest.approx(2 / 3),
        "auc": 0.5,
        "calibration": pytest.approx(0.8),
    }
    assert math.isnan(third["calibration"])
    assert math.isnan(third["auc"])


def test_most_frequent_has_most_examples_whatever_they_weigh() -> None:
    keys = np.array([3, 8, 8], np.uint64)
    clicked, probabilities = np.array([1, 0, 1], bool), np.float32([0.5, 0.5, 0.5])

    groups = figures_of_groups(keys, clicked, probabilities, np.float32([9, 1, 1]))

    assert [each["key"] for each in groups.most_frequent(2)] == ["8", "3"]
