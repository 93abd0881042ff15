"""The models in float64, one example and one element at a time; shares no code with ctr_model.

A model is a function of an example's numbers, of the rows of each slot by table, and of the tensors by name.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Slots = Mapping[str, Sequence[Array]]
Tensors = Mapping[str, Array]


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def pooled(dense: Array, rows_of_slots: Sequence[Array]) -> Array:
    """Returns the input of a network: the numbers, then the sum of each slot's rows."""
    return np.concatenate([dense, *(rows.sum(axis=0) for rows in rows_of_slots)])


def mlp(x: Array, tensors: Tensors, name: str = "fc") -> Array:
    """The layers `name1`, `name2`, ..., with relu between them."""
    last = 1
    while f"{name}{last + 1}.weight" in tensors:
        last += 1
    for i in range(1, last + 1):
        x = x @ tensors[f"{name}{i}.weight"] + tensors[f"{name}{i}.bias"]
        if i < last:
            x = np.where(x > 0, x, 0.0)
    return x


def first_order(dense: Array, weight: Array, bias: Array, features: Array) -> float:
    """Returns bias + weighted numbers + the weights float64[K, 1] of K features."""
    return float(bias[0] + np.dot(dense, weight) + sum(w for (w,) in features))


def interactions(features: Array) -> float:
    return float(sum(np.dot(first, second) for first, second in combinations(features, 2)))


def linear_logit(dense: Array, slots: Slots, tensors: Tensors, table: str = "linear") -> float:
    weight, bias = tensors[f"{table}.weight"], tensors[f"{table}.bias"]
    return first_order(dense, weight, bias, np.concatenate(slots[table]))


def fm_logit(dense: Array, slots: Slots, tensors: Tensors) -> float:
    features = np.concatenate(slots["embedding"])
    return linear_logit(dense, slots, tensors) + interactions(features)


def lr(dense: Array, slots: Slots, tensors: Tensors) -> float:
    return sigmoid(linear_logit(dense, slots, tensors))


def fm(dense: Array, slots: Slots, tensors: Tensors) -> float:
    return sigmoid(fm_logit(dense, slots, tensors))


def deepfm(dense: Array, slots: Slots, tensors: Tensors) -> float:
    """`slots["pooled"]`, if given, are those of the perceptron."""
    (deep,) = mlp(pooled(dense, slots.get("pooled", slots["embedding"])), tensors)
    return sigmoid(fm_logit(dense, slots, tensors) + deep)


def wide_deep(dense: Array, slots: Slots, tensors: Tensors) -> float:
    (deep,) = mlp(pooled(dense, slots["embedding"]), tensors)
    return sigmoid(linear_logit(dense, slots, tensors, "wide") + deep)


def ctr_dnn(dense: Array, slots: Slots, tensors: Tensors) -> float:
    logits = mlp(pooled(dense, slots["embedding"]), tensors)
    exponentials = np.exp(logits - logits.max())
    return float(exponentials[1] / exponentials.sum())


def cross(x0: Array, weights: Sequence[Array], biases: Sequence[Array]) -> Array:
    x = x0
    for weight, bias in zip(weights, biases, strict=True):
        x = np.array(
            [
                x0[j] * (sum(x[i] * weight[i, j] for i in range(len(x))) + bias[j]) + x[j]
                for j in range(len(x))
            ]
        )
    return x


def dcn_v2(dense: Array, slots: Slots, tensors: Tensors) -> float:
    """The names of the tensors determine structure and rank."""
    x0 = pooled(dense, slots["embedding"])
    weights, biases, layer = [], [], 1
    while f"cross{layer}.bias" in tensors:
        biases.append(tensors[f"cross{layer}.bias"])
        if f"cross{layer}.weight" in tensors:
            weights.append(tensors[f"cross{layer}.weight"])
        else:
            low = tensors[f"cross{layer}.weight_in"], tensors[f"cross{layer}.weight_out"]
            weights.append(low[0] @ low[1])
        layer += 1
    crossed = cross(x0, weights, biases)
    if "head.weight" in tensors:
        (deep,) = mlp(x0, tensors)
        return sigmoid(deep + np.dot(crossed, tensors["head.weight"]))
    (logit,) = mlp(crossed, tensors)
    return sigmoid(logit)


def din(
    dense: Array, slots: Slots, tensors: Tensors, *, histories: Mapping[int, int], max_length: int
) -> float:
    """`histories` has the target of each history."""
    embeddings = [rows.sum(axis=0) for rows in slots["embedding"]]
    for history, target in histories.items():
        t = embeddings[target]
        interest = np.zeros_like(t)
        for h in slots["embedding"][history][-max_length:]:
            x = np.concatenate([h, t, h - t, h * t])
            (weight,) = mlp(x, tensors, f"attention.C{history + 1}.")
            interest += (1.0 + weight) * h
        embeddings[history] = interest
    (logit,) = mlp(np.concatenate([dense, *embeddings]), tensors)
    return sigmoid(logit)


def esmm(dense: Array, slots: Slots, tensors: Tensors) -> list[float]:
    """Returns pCTR, pCVR and pCTCVR."""
    x = pooled(dense, slots["embedding"])
    (of_click,), (of_conversion,) = mlp(x, tensors, "ctr"), mlp(x, tensors, "cvr")
    ctr, cvr = sigmoid(of_click), sigmoid(of_conversion)
    return [ctr, cvr, ctr * cvr]


def esmm_loss(found: Sequence[float], labels: Sequence[float]) -> float:
    ctr, _, ctcvr = found
    click, both = labels[0], labels[0] * labels[1]
    return -math.log(ctr if click else 1.0 - ctr) - math.log(ctcvr if both else 1.0 - ctcvr)


def mmoe(dense: Array, slots: Slots, tensors: Tensors) -> list[float]:
    x = pooled(dense, slots["embedding"])
    experts = []
    while f"expert{len(experts) + 1}.1.weight" in tensors:
        out = mlp(x, tensors, f"expert{len(experts) + 1}.")
        experts.append(np.maximum(np.array(out), 0.0))
    found: list[float] = []
    while f"gate{len(found) + 1}.weight" in tensors:
        task = len(found) + 1
        powers = np.exp(x @ tensors[f"gate{task}.weight"])
        shares = powers / powers.sum()
        mixed = sum(share * expert for share, expert in zip(shares, experts, strict=True))
        (logit,) = mlp(np.array(mixed), tensors, f"tower{task}.")
        found.append(sigmoid(logit))
    return found


def mmoe_loss(found: Sequence[float], labels: Sequence[float]) -> float:
    return -sum(math.log(p if y else 1.0 - p) for p, y in zip(found, labels, strict=True))
