"""Optimizers in float64, from the formulas: (weights, memory, mean gradient) -> weights.

`memory` is a dict that an update keeps between calls; `state_of` lays it out as a row's columns.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Memory = dict[str, Vector]
Update = Callable[..., Vector]


def sgd(w: Vector, memory: Memory, g: Vector, learning_rate: float) -> Vector:
    return w - learning_rate * g


def adagrad(
    w: Vector,
    memory: Memory,
    g: Vector,
    learning_rate: float = 0.05,
    initial_accumulator: float = 0.0,
    epsilon: float = 1e-10,
) -> Vector:
    memory["n"] = memory.get("n", np.full(w.size, initial_accumulator)) + g**2
    return w - learning_rate * g / (np.sqrt(memory["n"]) + epsilon)


def adagrad_row(
    w: Vector, memory: Memory, g: Vector, learning_rate: float = 0.05, initial_g2sum: float = 3.0
) -> Vector:
    n = memory.get("n", np.zeros(1))
    memory["n"] = n + np.mean(g**2)
    return w - learning_rate * g * np.sqrt(initial_g2sum / (initial_g2sum + n))


def adam(
    w: Vector,
    memory: Memory,
    g: Vector,
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> Vector:
    t = memory.get("t", np.zeros(1)) + 1
    m = beta1 * memory.get("m", np.zeros(w.size)) + (1 - beta1) * g
    v = beta2 * memory.get("v", np.zeros(w.size)) + (1 - beta2) * g**2
    memory.update(t=t, m=m, v=v, beta1_power=beta1**t, beta2_power=beta2**t)
    return w - learning_rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)


def momentum(
    w: Vector,
    memory: Memory,
    g: Vector,
    learning_rate: float,
    momentum: float = 0.9,
    nesterov: float = 0.0,
) -> Vector:
    v = momentum * memory.get("v", np.zeros(w.size)) + g
    memory["v"] = v
    return w - learning_rate * (g + momentum * v if nesterov else v)


def adam_row(
    w: Vector,
    memory: Memory,
    g: Vector,
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> Vector:
    t = memory.get("t", np.zeros(1)) + 1
    m = beta1 * memory.get("m", np.zeros(w.size)) + (1 - beta1) * g
    v = beta2 * memory.get("v", np.zeros(1)) + (1 - beta2) * np.mean(g**2)
    memory.update(t=t, m=m, v=v, beta1_power=beta1**t, beta2_power=beta2**t)
    return w - learning_rate * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + epsilon)


def ftrl(
    w: Vector,
    memory: Memory,
    g: Vector,
    learning_rate: float = 0.05,
    beta: float = 1.0,
    l1: float = 0.0,
    l2: float = 0.0,
) -> Vector:
    n = memory.get("n", np.zeros(w.size))
    z = memory.get("z", -w * beta / learning_rate)
    sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / learning_rate
    z, n = z + g - sigma * w, n + g**2
    memory.update(z=z, n=n, rate_z=learning_rate * z)
    solution = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / learning_rate + l2)
    return np.where(np.abs(z) <= l1, 0.0, solution)


def add(w: Vector, memory: Memory, g: Vector) -> Vector:
    return w + g


UPDATES: dict[str, Update] = {
    "sgd": sgd,
    "adagrad": adagrad,
    "adagrad_row": adagrad_row,
    "adam": adam,
    "momentum": momentum,
    "adam_row": adam_row,
    "ftrl": ftrl,
    "sum": add,
}

STATE_COLUMNS = {
    "sgd": (),
    "adagrad": ("n",),
    "adagrad_row": ("n",),
    "adam": ("m", "v", "beta1_power", "beta2_power"),
    "momentum": ("v",),
    "adam_row": ("m", "v", "beta1_power", "beta2_power"),
    "ftrl": ("rate_z", "n"),
    "sum": (),
}


def state_of(optimizer: str, memory: Memory) -> Vector:
    """Returns the columns of state of a row that has been updated at least once."""
    return np.concatenate([np.zeros(0), *(memory[name] for name in STATE_COLUMNS[optimizer])])
