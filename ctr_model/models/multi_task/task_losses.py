"""Losses of models of several tasks, each summed over tasks and examples.

TASKS has a label, a logit and a probability a task:

    loss = sum over tasks k of the log loss of label k under p_k = sigmoid(z_k)

ENTIRE_SPACE has the labels y (click) and c (conversion), and the probabilities p = sigmoid(z_0) of a click,
q = sigmoid(z_1) of a conversion given a click, and p q of both:

    loss = log loss of y under p + log loss of y c under p q

Of the second term, l, with s = p q:

    y c = 1:  l = -log p - log q      dl/dz_0 = -(1 - p)            dl/dz_1 = -(1 - q)
    y c = 0:  l = -log(1 - s)         dl/dz_0 = s (1 - p)/(1 - s)   dl/dz_1 = s (1 - q)/(1 - s)

1 - s = (1 - p) + p (1 - q) is summed in logarithms, so that no logit, however large, gives 0 / 0.

Ma, Zhao, Huang, Wang, Hu, Zhu and Gai, "Entire space multi-task model: an effective approach for estimating
post-click conversion rate", SIGIR 2018, equation 5.
"""

import math

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.losses import Floats, Loss, logistic, softplus


@kernel
def task_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, T] with the probabilities under `logits` float32[B, T]."""
    for b in range(out.shape[0]):
        for k in range(out.shape[1]):
            logit = np.float64(logits[b, k])
            out[b, k] = np.float32(logistic(logit, math.exp(-abs(logit))))


@kernel
def task_cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """Returns the log losses summed over examples and tasks; as `binary_cross_entropy`, of shape [B, T]."""
    loss = 0.0
    for b in range(labels.shape[0]):
        for k in range(labels.shape[1]):
            logit, label = np.float64(logits[b, k]), labels[b, k]
            exponential = math.exp(-abs(logit))
            probability = logistic(logit, exponential)
            loss += weights[b] * softplus(logit if label == 0 else -logit, exponential)
            probabilities[b, k] = np.float32(probability)
            logit_grad[b, k] = np.float32(probability - label) * weights[b]
    return loss


@kernel
def entire_space_probabilities(logits: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, 3] with p, q and p q under `logits` float32[B, 2]."""
    for b in range(out.shape[0]):
        z, v = np.float64(logits[b, 0]), np.float64(logits[b, 1])
        click, conversion = logistic(z, math.exp(-abs(z))), logistic(v, math.exp(-abs(v)))
        out[b, 0] = np.float32(click)
        out[b, 1] = np.float32(conversion)
        out[b, 2] = np.float32(click * conversion)


@kernel
def entire_space_cross_entropy(
    logits: Floats, labels: Floats, weights: Floats, probabilities: Floats, logit_grad: Floats
) -> float:
    """Returns the log losses of clicks and of conversions; as `binary_cross_entropy`.

    Logits and labels are [B, 2], click and conversion; probabilities float32[B, 3] are p, q and p q.
    """
    entire_space_probabilities(logits, probabilities)
    loss = 0.0
    for b in range(labels.shape[0]):
        y, both = np.float64(labels[b, 0]), np.float64(labels[b, 0] * labels[b, 1])
        z, v = np.float64(logits[b, 0]), np.float64(logits[b, 1])
        exp_z, exp_v = math.exp(-abs(z)), math.exp(-abs(v))
        log_no_click, log_no_conversion = -softplus(z, exp_z), -softplus(v, exp_v)
        of_click = logistic(z, exp_z) - y
        loss += weights[b] * softplus(z if y == 0 else -z, exp_z)
        if both == 1:
            loss += weights[b] * (softplus(-z, exp_z) + softplus(-v, exp_v))
            of_click += -logistic(-z, exp_z)
            of_conversion = -logistic(-v, exp_v)
        else:
            log_p, log_q = -softplus(-z, exp_z), -softplus(-v, exp_v)
            unconverted = log_p + log_no_conversion
            larger, smaller = max(log_no_click, unconverted), min(log_no_click, unconverted)
            log_neither = larger + math.log1p(math.exp(smaller - larger))  # of 1 - s
            loss -= weights[b] * log_neither
            of_click += math.exp(log_p + log_q + log_no_click - log_neither)
            of_conversion = math.exp(log_p + log_q + log_no_conversion - log_neither)
        logit_grad[b, 0] = np.float32(of_click) * weights[b]
        logit_grad[b, 1] = np.float32(of_conversion) * weights[b]
    return loss


ENTIRE_SPACE = Loss((2,), entire_space_probabilities, entire_space_cross_entropy)


def tasks_loss(num_tasks: int) -> Loss:
    """Returns the loss TASKS of `num_tasks` tasks."""
    return Loss((num_tasks,), task_probabilities, task_cross_entropy)
