import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from ctr_model.metrics import THRESHOLDS, ClickMetrics, SlidingMetrics

EXAMPLES = st.lists(
    st.tuples(st.booleans(), st.floats(0, 1, width=32)), min_size=2, max_size=300
).filter(lambda rows: len({clicked for clicked, _ in rows}) == 2)


def arrays(rows: list[tuple[bool, float]]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([clicked for clicked, _ in rows], np.float32),
        np.array([p for _, p in rows], np.float32),
    )


def measured(labels: np.ndarray, probabilities: np.ndarray) -> ClickMetrics:
    metrics = ClickMetrics()
    metrics.add(labels, probabilities)
    return metrics


@given(EXAMPLES)
def test_auc_is_scikit_learns_on_predictions_rounded_to_buckets(
    rows: list[tuple[bool, float]],
) -> None:
    labels, probabilities = arrays(rows)
    buckets = np.minimum(np.floor(probabilities.astype(np.float64) * THRESHOLDS), THRESHOLDS - 1)

    assert measured(labels, probabilities).auc() == pytest.approx(roc_auc_score(labels, buckets))


def test_auc_is_scikit_learns_to_the_resolution_of_the_buckets() -> None:
    rng = np.random.default_rng(1)
    labels = (rng.random(20_000) < 0.2).astype(np.float32)
    probabilities = np.clip(rng.normal(0.2 + 0.1 * labels, 0.15), 0, 1).astype(np.float32)

    expected = roc_auc_score(labels, probabilities)

    assert measured(labels, probabilities).auc() == pytest.approx(expected, abs=1e-4)


@given(EXAMPLES)
def test_log_loss_is_scikit_learns(rows: list[tuple[bool, float]]) -> None:
    labels, probabilities = arrays(rows)
    bounded = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)

    assert measured(labels, probabilities).log_loss() == pytest.approx(log_loss(labels, bounded))


@given(EXAMPLES, st.integers(0, 2**32))
def test_weighted_metrics_are_scikit_learns(rows: list[tuple[bool, float]], seed: int) -> None:
    labels, probabilities = arrays(rows)
    weights = np.random.default_rng(seed).uniform(0.1, 5, labels.size).astype(np.float32)
    weight = weights.astype(np.float64)
    p = probabilities.astype(np.float64)
    metrics = ClickMetrics()

    metrics.add(labels, probabilities, weights)

    buckets = np.minimum(np.floor(p * THRESHOLDS), THRESHOLDS - 1)
    bounded = np.clip(p, 1e-7, 1 - 1e-7)
    assert metrics.auc() == pytest.approx(roc_auc_score(labels, buckets, sample_weight=weight))
    assert metrics.log_loss() == pytest.approx(log_loss(labels, bounded, sample_weight=weight))
    assert metrics.accuracy() == pytest.approx(
        accuracy_score(labels, p >= 0.5, sample_weight=weight)
    )
    assert metrics.calibration() == pytest.approx((weight @ p) / (weight @ labels))
    assert (metrics.examples, metrics.weight) == (labels.size, pytest.approx(weight.sum()))


def test_weight_of_three_is_three_examples() -> None:
    labels, probabilities = np.float32([1, 0, 0, 1]), np.float32([0.7, 0.2, 0.6, 0.4])
    metrics = ClickMetrics()
    metrics.add(labels, probabilities, np.float32([1, 3, 2, 0]))

    repeated = np.repeat(np.arange(4), [1, 3, 2, 0])
    expected = measured(labels[repeated], probabilities[repeated])

    assert metrics.auc() == expected.auc()
    assert metrics.log_loss() == pytest.approx(expected.log_loss())
    assert metrics.calibration() == pytest.approx(expected.calibration())
    assert (metrics.examples, metrics.weight) == (4, 6)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 labels came with 1 weights"):
        ClickMetrics().add(np.ones(2, np.float32), np.ones(2, np.float32), np.ones(1, np.float32))


@given(EXAMPLES, st.integers(0, 300))
def test_merged_metrics_are_those_of_all_examples(rows: list[tuple[bool, float]], cut: int) -> None:
    labels, probabilities = arrays(rows)
    whole = measured(labels, probabilities)

    merged = measured(labels[:cut], probabilities[:cut])
    merged.merge(measured(labels[cut:], probabilities[cut:]))

    assert merged.auc() == whole.auc()
    assert merged.log_loss() == pytest.approx(whole.log_loss())
    assert merged.examples == whole.examples


@given(EXAMPLES)
def test_metrics_survive_as_a_vector(rows: list[tuple[bool, float]]) -> None:
    metrics = measured(*arrays(rows))

    restored = ClickMetrics.from_vector(metrics.to_vector())

    assert restored.to_vector().tobytes() == metrics.to_vector().tobytes()
    assert restored.auc() == metrics.auc()


def test_accuracy_and_calibration() -> None:
    metrics = measured(
        np.array([1, 1, 0, 0], np.float32), np.array([0.75, 0.25, 0.5, 0.0], np.float32)
    )

    assert metrics.accuracy() == 0.5
    assert metrics.calibration() == 0.75


@given(EXAMPLES)
def test_sums_of_errors_are_numpys(rows: list[tuple[bool, float]]) -> None:
    labels, probabilities = arrays(rows)
    errors = labels.astype(np.float64) - probabilities

    metrics = measured(labels, probabilities)

    assert metrics.absolute_error == pytest.approx(np.abs(errors).sum())
    assert metrics.squared_error == pytest.approx((errors**2).sum())
    assert metrics.correct == round(metrics.accuracy() * metrics.examples)


def test_figures_of_nothing_are_nan() -> None:
    metrics = ClickMetrics()

    assert all(
        math.isnan(figure)
        for figure in (metrics.auc(), metrics.log_loss(), metrics.accuracy(), metrics.calibration())
    )


def test_auc_of_one_class_is_nan() -> None:
    assert math.isnan(measured(np.ones(3, np.float32), np.full(3, 0.5, np.float32)).auc())


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan])
def test_prediction_out_of_range_is_refused(wrong: float) -> None:
    metrics = ClickMetrics()

    with pytest.raises(ValueError, match="not in"):
        metrics.add(np.ones(2, np.float32), np.array([0.5, wrong], np.float32))
    assert metrics.examples == 0


def test_labels_without_predictions_are_refused() -> None:
    metrics = ClickMetrics()

    with pytest.raises(ValueError, match="2 labels came with 1 predictions"):
        metrics.add(np.ones(2, np.float32), np.full(1, 0.5, np.float32))
    assert metrics.examples == 0


def test_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        ClickMetrics.from_vector(np.zeros(3))


def test_sliding_metrics_forget_all_but_the_last_batches() -> None:
    rng = np.random.default_rng(2)
    sliding = SlidingMetrics(window=3)
    batches = [
        ((rng.random(50) < 0.5).astype(np.float32), rng.random(50, np.float32)) for _ in range(7)
    ]

    for labels, probabilities in batches:
        sliding.add(labels, probabilities)

    last = ClickMetrics()
    for labels, probabilities in batches[-3:]:
        last.add(labels, probabilities)
    assert sliding.metrics().to_vector().tobytes() == last.to_vector().tobytes()


def test_sliding_metrics_keep_their_own_copy_of_predictions() -> None:
    sliding = SlidingMetrics()
    probabilities = np.array([0.9, 0.1], np.float32)
    sliding.add(np.array([1, 0], np.float32), probabilities)

    probabilities[:] = probabilities[::-1].copy()

    assert sliding.metrics().auc() == 1.0
