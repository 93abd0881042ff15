import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from ctr_ps.ctr_model.metrics import CELLS, ClickMetrics, SlidingMetrics

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


def predictions_of(logits: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def drawn(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels and predictions of a hard case."""
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, 40_000)
    click_rate, _, shape = name.partition(" ")
    base = math.log(float(click_rate)) - math.log1p(-float(click_rate))
    order = 1 / (
        1 + np.exp(-(base + 1.5 * noise))
    )  # what the predictions rank, well calibrated or not
    labels = (rng.random(noise.size) < order).astype(np.float32)
    labels[:3] = (1, 0, 1)
    match shape:
        case "little spread":
            return labels, predictions_of(base + 0.003 * noise)
        case "narrow band":
            return labels, (0.02 * (1 + 1e-5 * noise)).astype(np.float32)
        case "extreme spread":
            return labels, predictions_of(base + 30 * noise)
        case "ties":
            return labels, np.float32([0.1, 0.2, 0.201, 0.7])[np.digitize(noise, [-1, 0, 1])]
        case "rounded":
            return labels, np.round(predictions_of(base + noise), 3)
        case "near one":
            return labels, predictions_of(9 + noise)
        case _:
            return labels, predictions_of(base + noise)


@pytest.mark.parametrize(
    "name",
    [
        "0.5",
        "0.02",
        "0.001",
        "0.0002",
        "0.00005",
        "0.00001",
        "0.0002 little spread",
        "0.0002 narrow band",
        "0.0002 extreme spread",
        "0.5 extreme spread",
        "0.02 ties",
        "0.02 rounded",
        "0.02 near one",
    ],
)
def test_auc_is_scikit_learns_at_any_click_rate_and_of_many_workers(name: str) -> None:
    labels, probabilities = drawn(name)
    parts = [measured(labels[each::8], probabilities[each::8]) for each in range(8)]

    whole = measured(labels, probabilities).auc()
    bounds = np.max([part.bounds() for part in parts], axis=0)
    vectors = [part.to_vector(bounds) for part in parts]

    assert whole == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-4)
    assert ClickMetrics.from_vector(np.sum(vectors, axis=0), bounds).auc() == whole
    assert vectors[0].size <= 2 * CELLS + 8


# From 1e-30 to 1 - 1e-7: any two differ by 2 % at least, of themselves or of what is left to 1.
APART = [0.0, *np.geomspace(1e-30, 0.5, 3000), *(1 - np.geomspace(0.49, 1e-6, 400)), 1.0]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(APART)), min_size=2, max_size=300))
def test_auc_of_predictions_that_differ_is_exact(rows: list[tuple[bool, float]]) -> None:
    labels, probabilities = arrays([(True, APART[1700]), (False, APART[1701]), *rows])

    found = measured(labels, probabilities).auc()

    assert found == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)


def test_zero_without_and_with_a_sign_are_one_prediction() -> None:
    labels, probabilities = np.float32([1, 0, 1, 0]), np.float32([0.0, -0.0, -0.0, 0.25])

    assert measured(labels, probabilities).auc() == roc_auc_score(labels, probabilities) == 0.25


@given(EXAMPLES)
def test_log_loss_is_scikit_learns(rows: list[tuple[bool, float]]) -> None:
    labels, probabilities = arrays(rows)
    bounded = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)

    assert measured(labels, probabilities).log_loss() == pytest.approx(log_loss(labels, bounded))


def test_normalized_entropy_is_of_the_click_rate() -> None:
    """By hand: of 1 click in 4 predicted at 0.5, 1 bit an example, where the rate needs 0.811 bits."""
    labels = np.float32([1, 0, 0, 0])
    entropy_bits = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))

    assert measured(labels, np.full(4, 0.5, np.float32)).normalized_entropy() == pytest.approx(
        1 / entropy_bits
    )
    assert measured(labels, np.full(4, 0.25, np.float32)).normalized_entropy() == pytest.approx(1)
    assert math.isnan(measured(labels[:1], labels[:1]).normalized_entropy())


@given(EXAMPLES, st.integers(0, 2**32))
def test_weighted_metrics_are_scikit_learns(rows: list[tuple[bool, float]], seed: int) -> None:
    labels, probabilities = arrays(rows)
    weights = np.random.default_rng(seed).uniform(0.1, 5, labels.size).astype(np.float32)
    weight = weights.astype(np.float64)
    p = probabilities.astype(np.float64)
    metrics = ClickMetrics()

    metrics.add(labels, probabilities, weights)

    bounded = np.clip(p, 1e-7, 1 - 1e-7)
    assert metrics.log_loss() == pytest.approx(log_loss(labels, bounded, sample_weight=weight))
    assert metrics.accuracy() == pytest.approx(
        accuracy_score(labels, p >= 0.5, sample_weight=weight)
    )
    assert metrics.calibration() == pytest.approx((weight @ p) / (weight @ labels))
    assert (metrics.examples, metrics.weight) == (labels.size, pytest.approx(weight.sum()))


def test_auc_of_weighted_examples_is_scikit_learns() -> None:
    labels, probabilities = drawn("0.0002")
    weights = np.random.default_rng(2).uniform(0.1, 5, labels.size).astype(np.float32)
    metrics = ClickMetrics()

    metrics.add(labels, probabilities, weights)

    expected = roc_auc_score(labels, probabilities, sample_weight=weights)
    assert metrics.auc() == pytest.approx(expected, abs=5e-5)


def test_weights_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="1 weights for 2 labels"):
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
    rest = whole.without(measured(labels[:cut], probabilities[:cut]))
    assert rest.examples == labels[cut:].size
    assert rest.log_loss() == pytest.approx(
        measured(labels[cut:], probabilities[cut:]).log_loss(), nan_ok=True
    )


@given(EXAMPLES)
def test_metrics_survive_as_a_vector(rows: list[tuple[bool, float]]) -> None:
    metrics = measured(*arrays(rows))

    bounds = metrics.bounds()
    restored = ClickMetrics.from_vector(metrics.to_vector(bounds), bounds)

    assert restored.to_vector(bounds).tobytes() == metrics.to_vector(bounds).tobytes()
    assert restored.auc() == metrics.auc()


@pytest.mark.parametrize("others", [[0.4, 0.6], []])
def test_what_is_outside_of_bounds_is_in_the_outermost_cells(others: list[float]) -> None:
    """As of a process in a lost one's place, which is told the bounds of that one's examples."""
    metrics, other = measured(np.float32([1, 0]), np.float32([0.1, 0.9])), ClickMetrics()
    other.add(np.zeros(len(others), np.float32), np.float32(others))
    bounds = other.bounds()

    found = ClickMetrics.from_vector(metrics.to_vector(bounds), bounds)

    assert (found.examples, found.log_loss()) == (2, metrics.log_loss())
    assert found.auc() == 0.0 if others else math.isnan(found.auc())


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

    with pytest.raises(ValueError, match="1 predictions for 2 labels"):
        metrics.add(np.ones(2, np.float32), np.full(1, 0.5, np.float32))
    assert metrics.examples == 0


def test_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        ClickMetrics.from_vector(np.zeros(3), ClickMetrics().bounds())


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
    found, bounds = sliding.metrics(), last.bounds()
    assert found.to_vector(bounds).tobytes() == last.to_vector(bounds).tobytes()


def test_sliding_metrics_keep_their_own_copy_of_predictions() -> None:
    sliding = SlidingMetrics()
    probabilities = np.array([0.9, 0.1], np.float32)
    sliding.add(np.array([1, 0], np.float32), probabilities)

    probabilities[:] = probabilities[::-1].copy()

    assert sliding.metrics().auc() == 1.0
