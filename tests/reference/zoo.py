"""The models of ctr_model/torch/zoo in float64, one example at a time, from the papers; in numpy.

As in `models`, a model is a function of an example's numbers, of the rows of each slot by table, and of the
tensors by name.
"""

import numpy as np

from tests.reference.models import Array, Slots, Tensors, sigmoid


def linear(x: Array, tensors: Tensors, name: str) -> Array:
    return tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"]


def relu(x: Array) -> Array:
    return np.where(x > 0, x, 0.0)


def hidden(x: Array, tensors: Tensors, name: str) -> Array:
    """Layers with relu, each followed by a relu and a dropout among the modules."""
    place = 0
    while f"{name}.{place}.weight" in tensors:
        x = relu(linear(x, tensors, f"{name}.{place}"))
        place += 3
    return x


def mlp(x: Array, tensors: Tensors, name: str) -> Array:
    return linear(hidden(x, tensors, f"{name}.hidden"), tensors, f"{name}.out")


def fields(dense: Array, slots: Slots, tensors: Tensors) -> list[Array]:
    numbers = [x * v for x, v in zip(dense, tensors["fields.numbers"], strict=True)]
    return [*numbers, *(rows.sum(axis=0) for rows in slots["embedding"])]


def final_mlp(dense: Array, slots: Slots, tensors: Tensors) -> float:
    """With two slots in `context2`, none in `context1`."""
    flat = np.concatenate(fields(dense, slots, tensors))
    (constant,) = tensors["gates.0.constant"]
    outputs = []
    for k, context in enumerate([constant, sum(r.sum(axis=0) for r in slots["context2"])]):
        gate = [2 * sigmoid(value) for value in mlp(context, tensors, f"gates.{k}.mlp")]
        outputs.append(hidden(gate * flat, tensors, f"streams.{k}"))
    first, second = outputs
    (logit,) = linear(np.concatenate(outputs), tensors, "out")
    part = len(first) // len(tensors["products"])
    for head, weights in enumerate(tensors["products"]):
        for i in range(part):
            for j in range(part):
                logit += first[head * part + i] * weights[i, j] * second[head * part + j]
    return sigmoid(logit)
