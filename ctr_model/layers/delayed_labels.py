"""Corrections for clicks that arrive after their impressions: each is first a row without a click.

Every impression is a row without a click at once, and a click later one more row. Where p is the probability
of a click and r the share of rows without one that is trained on, rows have the click rate

    b = p / (p + r)

    fnw   a row counts 1 + p with a click, (1 - p)(1 + p) without one, where p is the model's own prediction,
          held fixed: the gradient by the logit is expected to be that of p, times positive numbers
    fnc   the loss is that of the rows, so the model learns b of r = 1: it predicts b / (1 - b), at most 1

Ktena et al., "Addressing delayed feedback for continuous training with neural networks in CTR prediction",
RecSys 2019 (arXiv 1907.06558).
"""

from typing import Any, Literal

Delay = Literal["none", "fnw", "fnc"]
"""Corrections: none, fake-negative weights, or fake-negative calibration."""

Array = Any
"""float32[B], of numpy or PyTorch."""


def fake_negative_weights(labels: Array, probabilities: Array) -> Array:
    """Returns the weights of rows, for `fnw`, from their labels and p."""
    return (1.0 + probabilities) * (1.0 - probabilities * (labels == 0))


def rates_of_rows(probabilities: Array, rate: float) -> Array:
    """Returns b, from p and r."""
    return probabilities / (probabilities + rate)


def calibrated(rates: Array) -> Array:
    """Returns p, at most 1, from b of r = 1, for `fnc`."""
    capped = rates.clip(max=0.5)
    return capped / (1.0 - capped)
