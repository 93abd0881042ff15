import math

import numpy as np
import pytest

from ctr_model.losses import click_probabilities, cross_entropy


def run(logits: list[list[float]], labels: list[float]) -> tuple[float, np.ndarray, np.ndarray]:
    z = np.array(logits, np.float32)
    probabilities = np.empty(len(labels), np.float32)
    grad = np.empty_like(z)
    loss = cross_entropy(z, np.array(labels, np.float32), probabilities, grad)
    return loss, probabilities, grad


def test_even_logits_are_a_coin() -> None:
    loss, probabilities, grad = run([[0.0, 0.0], [3.0, 3.0]], [1.0, 0.0])

    assert loss == pytest.approx(2 * math.log(2))
    assert probabilities.tolist() == [0.5, 0.5]
    assert grad.tolist() == [[0.5, -0.5], [-0.5, 0.5]]


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("difference", [-800.0, -90.0, 90.0, 800.0])
def test_extreme_logits_stay_finite(difference: float, label: float) -> None:
    loss, probabilities, grad = run([[0.0, difference]], [label])

    wrong_by = max(difference if label == 0 else -difference, 0.0)
    assert loss == pytest.approx(wrong_by, abs=1e-6)
    assert np.isfinite(grad).all()
    assert 0 <= probabilities[0] <= 1


def test_gradient_is_the_difference_quotient() -> None:
    logits, labels, step = [[0.3, -0.8], [1.5, 0.2]], [1.0, 0.0], 1e-2
    _, _, grad = run(logits, labels)

    for b in range(2):
        for c in range(2):
            upper, lower = [list(row) for row in logits], [list(row) for row in logits]
            upper[b][c] += step
            lower[b][c] -= step
            quotient = (run(upper, labels)[0] - run(lower, labels)[0]) / (2 * step)
            assert grad[b, c] == pytest.approx(quotient, abs=1e-4)


def test_prediction_is_the_same_as_in_training() -> None:
    logits = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    predicted = np.empty(50, np.float32)

    click_probabilities(logits, predicted)
    _, trained, _ = run(logits.tolist(), [0.0] * 50)

    assert predicted.tobytes() == trained.tobytes()
