import math

import numpy as np
import pytest

from ctr_ps.ctr_model.layers.losses import (
    binary_cross_entropy,
    cross_entropy,
    sigmoid_probabilities,
)


def run(logits: list[list[float]], labels: list[float]) -> tuple[float, np.ndarray, np.ndarray]:
    z = np.array(logits, np.float32)
    probabilities = np.empty(len(labels), np.float32)
    grad = np.empty_like(z)
    loss = cross_entropy(
        z, np.array(labels, np.float32), np.ones(len(labels), np.float32), probabilities, grad
    )
    return loss, probabilities, grad


def run_one(logits: list[float], labels: list[float]) -> tuple[float, np.ndarray, np.ndarray]:
    z = np.array(logits, np.float32)
    probabilities, grad = np.empty_like(z), np.empty_like(z)
    loss = binary_cross_entropy(
        z, np.array(labels, np.float32), np.ones(len(labels), np.float32), probabilities, grad
    )
    return loss, probabilities, grad


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("difference", [-800.0, -90.0, 90.0, 800.0])
def test_extreme_logits_stay_finite(difference: float, label: float) -> None:
    loss, probabilities, grad = run([[0.0, difference]], [label])

    wrong_by = max(difference if label == 0 else -difference, 0.0)
    assert loss == pytest.approx(wrong_by, abs=1e-6)
    assert np.isfinite(grad).all()
    assert 0 <= probabilities[0] <= 1


def test_small_losses_are_not_lost() -> None:
    """log(1 + exp(-40)) is 4e-18, which adding to 1 would drop."""
    loss, _, _ = run_one([40.0], [1.0])

    assert loss == pytest.approx(math.exp(-40.0), rel=1e-6, abs=0)


def test_one_logit_is_two_of_which_the_first_is_zero() -> None:
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(scale=3.0, size=50), rng.integers(0, 2, 50).astype(float)
    logits[:8], labels[:8] = [0, 0, -800, -800, -90, 90, 800, 800], [0, 1] * 4
    pairs = [[0.0, logit] for logit in logits]
    predicted = np.empty(50, np.float32)

    sigmoid_probabilities(logits.astype(np.float32), predicted)
    one, two = run_one(logits.tolist(), labels.tolist()), run(pairs, labels.tolist())

    assert one[0] == two[0]
    assert predicted.tobytes() == one[1].tobytes() == two[1].tobytes()
    assert one[2].tobytes() == two[2][:, 1].tobytes()
