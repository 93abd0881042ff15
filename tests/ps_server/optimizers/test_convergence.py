"""Every optimizer finds the minimum of a convex function."""

import numpy as np
import pytest

from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.sparse_table import SparseTable

LEARNING_RATES = {
    "sgd": 0.5,
    "momentum": 0.05,
    "adagrad": 0.5,
    "adagrad_row": 0.5,
    "adam": 0.05,
    "adam_row": 0.05,
    "ftrl": 5.0,
    "sum": 0.5,
}
CLICK_RATES = {
    "sgd": 10.0,
    "momentum": 1.0,
    "adagrad": 0.2,
    "adagrad_row": 10.0,
    "adam": 0.05,
    "adam_row": 0.05,
    "ftrl": 1.0,
    "sum": 10.0,
}
UNIFORM = InitializerSpec(kind="uniform", scale=1.0)


def spec_of(name: str, learning_rate: float) -> OptimizerSpec:
    has_rate = "learning_rate" in OPTIMIZERS[name].ranges
    return OptimizerSpec(name=name, params={"learning_rate": learning_rate} if has_rate else {})


def pushed(name: str, gradient: np.ndarray, learning_rate: float) -> np.ndarray:
    """Returns what is pushed: with `sum` the pusher makes the step."""
    return -np.float32(learning_rate) * gradient if name == "sum" else gradient


def test_every_optimizer_takes_part() -> None:
    assert OPTIMIZERS.keys() == LEARNING_RATES.keys()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_reach_the_bottom_of_a_parabola(name: str) -> None:
    rate = LEARNING_RATES[name]
    table = SparseTable(
        TableSpec(name="t", dim=4, initializer=UNIFORM, optimizer=spec_of(name, rate))
    )
    keys = np.arange(20, dtype=np.uint64)
    target = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)

    for _ in range(400):
        gradient = table.pull(keys, Missing.INITIAL) - target
        table.push(SparseGrad(keys, pushed(name, gradient, rate), 1))

    assert np.abs(table.pull(keys, Missing.ZEROS) - target).max() < 1e-3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logistic_regression_on_sparse_rows_beats_the_weights_that_made_the_clicks(
    name: str,
) -> None:
    """The planted weights are not the minimum of a finite sample: the minimum is below them."""
    rng = np.random.default_rng(1)
    planted = rng.normal(size=40)
    features = np.array([rng.choice(40, 5, replace=False) for _ in range(400)])  # [B, S]
    clicks = rng.random(400) < 1 / (1 + np.exp(-planted[features].sum(axis=1)))
    keys = np.arange(40, dtype=np.uint64)
    rate = CLICK_RATES[name]
    spec = TableSpec(name="t", dim=1, initializer=InitializerSpec(), optimizer=spec_of(name, rate))
    table = SparseTable(spec)

    for step in range(200):
        batch = slice(200 * (step % 2), 200 * (step % 2) + 200)
        weights = table.pull(keys, Missing.INITIAL)[:, 0]
        errors = probabilities(weights, features[batch]) - clicks[batch]
        gradient = np.zeros(40)
        np.add.at(gradient, features[batch], errors[:, None])
        values = pushed(name, gradient.astype(np.float32)[:, None], rate)
        table.push(SparseGrad(keys, values, 200))

    learned = log_loss(table.pull(keys, Missing.ZEROS)[:, 0], features, clicks)
    assert learned < log_loss(planted, features, clicks)


def probabilities(weights: np.ndarray, features: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-weights[features].sum(axis=1)))


def log_loss(weights: np.ndarray, features: np.ndarray, clicks: np.ndarray) -> float:
    likelihood = np.where(
        clicks, probabilities(weights, features), 1 - probabilities(weights, features)
    )
    return float(-np.log(likelihood).mean())
