"""Calibration by buckets, against sorted examples."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ps_worker.training.evaluation.breakdown import Calibration, calibration_error

# Few distinct predictions, with the smallest and the largest that there are.
PREDICTIONS = [
    -0.0,
    0.0,
    float(np.float32(1e-45)),
    1e-7,
    0.1,
    0.25,
    float(np.float32(1 - 2**-24)),
    1.0,
]
EXAMPLES = st.lists(
    st.tuples(st.booleans(), st.sampled_from(PREDICTIONS), st.sampled_from([0.5, 1.0, 3.0])),
    max_size=60,
)


def buckets_of(clicked, probabilities, weights, number: int, batch: int = 7) -> list[dict]:
    calibration = Calibration()
    arrays = np.array(clicked, bool), np.float32(probabilities), np.float32(weights)
    for start in range(0, len(arrays[0]), batch):
        calibration.add(*(array[start : start + batch] for array in arrays))
    return calibration.buckets(number)


@pytest.mark.parametrize("number", [1, 3, 10, 99, 100, 200])
def test_buckets_are_those_of_sorted_predictions_that_differ(number: int) -> None:
    rng = np.random.default_rng(1)
    probabilities = rng.permutation(np.geomspace(1e-6, 1.0, 100).astype(np.float32))
    clicked, weights = rng.random(100) < 0.4, rng.choice(np.float32([0, 0.5, 3]), 100)
    order = np.argsort(probabilities)
    places = np.floor((np.arange(100) + 0.5) * number / 100)

    found = buckets_of(clicked, probabilities, weights, number)

    assert len(found) == min(number, 100)
    for bucket, place in zip(found, np.unique(places), strict=True):
        rows = order[places == place]
        weight, of_clicks = weights[rows].sum(), weights[rows] @ clicked[rows]
        predicted = weights[rows] @ probabilities[rows]
        assert bucket["examples"] == len(rows)
        assert abs(len(rows) - 100 / number) < 1
        assert bucket["weight"] == weight
        assert (bucket["lowest"], bucket["highest"]) == tuple(probabilities[rows[[0, -1]]])
        for name, value, total in (
            ("predicted", predicted, weight),
            ("click_rate", of_clicks, weight),
            ("calibration", predicted, of_clicks),
        ):
            expected = float(value / total) if total else math.nan
            assert bucket[name] == pytest.approx(expected, nan_ok=True)


@given(EXAMPLES, st.integers(1, 12))
def test_each_prediction_is_in_one_bucket(rows, number: int) -> None:
    clicked, probabilities, weights = zip(*rows, strict=True) if rows else ((), (), ())

    buckets = buckets_of(clicked, probabilities, weights, number)

    assert sum(each["examples"] for each in buckets) == len(rows)
    assert len(buckets) <= number
    assert all(each["lowest"] <= each["highest"] for each in buckets)
    assert all(one["highest"] < other["lowest"] for one, other in itertools.pairwise(buckets))
    clicks = sum(each["click_rate"] * each["weight"] for each in buckets)
    assert clicks == pytest.approx(float(np.dot(clicked, weights)) if rows else 0.0)


def test_buckets_of_close_predictions_are_of_about_one_size() -> None:
    """As of a model of rare clicks, all within a tenth of their rate."""
    rng = np.random.default_rng(3)
    probabilities = rng.uniform(0.001, 0.0011, 100_000)

    buckets = buckets_of(np.zeros(100_000), probabilities, np.ones(100_000), 10, batch=5000)

    assert [each["examples"] for each in buckets] == pytest.approx([10_000] * 10, rel=0.03)


def test_calibrated_predictions_have_a_small_error_and_others_their_distance() -> None:
    rng = np.random.default_rng(2)
    rates = rng.random(200_000).astype(np.float32)
    clicked, ones = rng.random(rates.size) < rates, np.ones(rates.size)

    right = calibration_error(buckets_of(clicked, rates, ones, 10, batch=5000))
    wrong = calibration_error(buckets_of(clicked, rates / 2, ones, 10, batch=5000))

    assert right < 0.005
    assert wrong == pytest.approx(0.25, abs=0.005)
    assert math.isnan(calibration_error([]))


def test_bucket_of_examples_without_weight_has_no_part_in_the_error() -> None:
    clicked, probabilities, weights = [1, 0, 1], [0.2, 0.5, 0.9], [1.0, 0.0, 3.0]

    buckets = buckets_of(clicked, probabilities, weights, 3)

    assert [each["weight"] for each in buckets] == weights
    assert calibration_error(buckets) == pytest.approx((1 * 0.8 + 3 * 0.1) / 4)
