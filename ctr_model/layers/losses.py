"""Log loss of a click, for models with one logit (logistic) or two (softmax over no click, click).

    d = z for one logit, z1 - z0 for two
    p = 1 / (1 + exp(-d)),   loss = -log p if clicked, -log(1 - p) if not

With two classes, softmax is the logistic function of the difference. The only exponential computed is
exp(-|d|), which cannot overflow:

    p = 1 / (1 + exp(-|d|)) if d >= 0, exp(-|d|) / (1 + exp(-|d|)) if not
    log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), which keeps small terms
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel

Floats = NDArray[np.float32]


@kernel
def logistic(x: float, exponential: float) -> float:
    """Returns 1 / (1 + exp(-x)), given `exponential` = exp(-|x|)."""
    return (1.0 if x >= 0.0 else exponential) / (1.0 + exponential)


@kernel
def softplus(x: float, exponential: float) -> float:
    """Returns log(1 + exp(x)), which is -log(1 - p), given `exponential` = exp(-|x|)."""
    return max(x, 0.0) + math.log1p(exponential)


@kernel
def sigmoid_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B] with the probability of a click under `logits` float32[B]."""
    for b in range(out.size):
        logit = np.float64(logits[b])
        out[b] = np.float32(logistic(logit, math.exp(-abs(logit))))


@kernel
def binary_cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """Returns the log loss summed over examples, each times its weight; labels are 1 for a click, else 0.

    Overwrites float32[B] `probabilities` of a click, and `logit_grad` with the gradient of the sum.
    """
    loss = 0.0
    for b in range(labels.size):
        logit = np.float64(logits[b])
        exponential = math.exp(-abs(logit))
        probability = logistic(logit, exponential)
        loss += weights[b] * softplus(logit if labels[b] == 0 else -logit, exponential)
        probabilities[b] = np.float32(probability)
        logit_grad[b] = np.float32(probability - labels[b]) * weights[b]
    return loss


@kernel
def click_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B] with the probability of class 1 under `logits` float32[B, 2]."""
    for b in range(out.size):
        difference = np.float64(logits[b, 1]) - np.float64(logits[b, 0])
        out[b] = np.float32(logistic(difference, math.exp(-abs(difference))))


@kernel
def cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """As `binary_cross_entropy`, for `logits` and `logit_grad` float32[B, 2]."""
    loss = 0.0
    for b in range(labels.size):
        difference = np.float64(logits[b, 1]) - np.float64(logits[b, 0])
        exponential = math.exp(-abs(difference))
        probability = logistic(difference, exponential)
        against = difference if labels[b] == 0 else -difference
        loss += weights[b] * softplus(against, exponential)
        probabilities[b] = np.float32(probability)
        error = np.float32(probability - labels[b]) * weights[b]
        logit_grad[b, 0] = -error
        logit_grad[b, 1] = error
    return loss


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, and the mapping of logits to probabilities."""

    shape: tuple[int, ...]  # shape of an example's logits; () for one logit
    probabilities: Callable[[Floats, Floats], None]  # a function like `sigmoid_probabilities`
    # a function like `binary_cross_entropy`
    with_gradient: Callable[[Floats, Floats, Floats, Floats, Floats], float]


SIGMOID = Loss((), sigmoid_probabilities, binary_cross_entropy)
SOFTMAX = Loss((2,), click_probabilities, cross_entropy)
