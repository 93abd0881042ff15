"""PLE, PEPNet and two towers in float64, one example at a time, from the papers; in numpy."""

from typing import Any

import numpy as np

from tests.reference.models import Array, Slots, Tensors, pooled, sigmoid
from tests.reference.zoo import hidden, linear, mlp, relu


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def ple(dense: Array, slots: Slots, tensors: Tensors) -> list[float]:
    x = pooled(dense, slots["embedding"])
    num_tasks = sum(name.endswith("out.bias") for name in tensors)
    num_levels = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("levels"))
    states = [x] * (1 + num_tasks)  # what is shared first
    for level in range(num_levels):
        place, is_last = f"levels.{level}", level == num_levels - 1
        experts: list[list[Array]] = []
        for group, state in enumerate(states):
            experts.append([])
            while f"{place}.groups.{group}.{len(experts[group])}.0.weight" in tensors:
                name = f"{place}.groups.{group}.{len(experts[group])}"
                experts[group].append(hidden(state, tensors, name))
        after = list(states)
        for group, state in enumerate(states):
            if group == 0 and is_last:
                continue
            own = [*experts[group], *experts[0]]
            chosen = own if group else [each for of_group in experts for each in of_group]
            weight = tensors[f"{place}.gates.{group - is_last}.weight"]
            shares = softmax(weight @ state)
            after[group] = sum(s * e for s, e in zip(shares, chosen, strict=True))  # type: ignore[assignment]
        states = after
    return [
        sigmoid(float(mlp(state, tensors, f"towers.{k}")[0])) for k, state in enumerate(states[1:])
    ]


def gate(x: Array, tensors: Tensors, name: str) -> Array:
    out = linear(relu(linear(x, tensors, f"{name}.0")), tensors, f"{name}.2")
    return 2.0 / (1.0 + np.exp(-out))


def pepnet(
    dense: Array,
    slots: Slots,
    tensors: Tensors,
    *,
    domain: int,
    prior: tuple[int, ...],
    frozen: dict[bytes, tuple[Array, Array]],
) -> list[float]:
    """`frozen` has, by the example's numbers, X and X' through which no gradient flows; filled first."""
    rows = slots["embedding"]
    x = pooled(dense, rows)
    still, still_personal = frozen.get(dense.tobytes(), (x, None))
    of_domain = rows[domain].sum(axis=0)
    personal = gate(np.concatenate([of_domain, still]), tensors, "domain_gate") * x
    if still_personal is None:
        still_personal = frozen.setdefault(dense.tobytes(), (x, personal))[1]
    seen = np.concatenate([*(rows[slot].sum(axis=0) for slot in prior), still_personal])
    found = []
    while f"outs.{len(found)}.bias" in tensors:
        k, h, layer = len(found), personal, 0
        factors = gate(seen, tensors, f"gates.{k}")
        while f"layers.{k}.{layer}.weight" in tensors:
            h = relu(linear(h, tensors, f"layers.{k}.{layer}"))
            h, factors = factors[: h.size] * h, factors[h.size :]
            layer += 1
        found.append(sigmoid(float(linear(h, tensors, f"outs.{k}")[0])))
    return found


def log_losses(found: Any, labels: Any) -> float:
    return -sum(float(np.log(p if y else 1.0 - p)) for p, y in zip(found, labels, strict=True))


def two_towers(dense: Array, slots: Slots, tensors: Tensors, *, item: int, share: int) -> Array:
    """Returns u and v, one after the other."""
    rows = slots["embedding"]
    user = [np.delete(dense, share)]
    user += [each.sum(axis=0) for slot, each in enumerate(rows) if slot != item]
    u = mlp(np.concatenate(user), tensors, "user")
    v = mlp(rows[item].sum(axis=0), tensors, "item")
    return np.concatenate([u / np.linalg.norm(u), v / np.linalg.norm(v)])


def two_towers_loss(
    vectors: Array,
    clicks: Array,
    dense: Array,
    labels: Array,
    weights: Array,
    *,
    temperature: float,
    share: int,
) -> float:
    """`clicks` are probabilities, which do not depend on `vectors`."""
    u, v = np.split(np.array(vectors), 2, axis=1)
    loss = 0.0
    for i, label in enumerate(labels):
        loss -= weights[i] * np.log(clicks[i] if label else 1.0 - clicks[i])
        scores = [u[i] @ v[j] / temperature - dense[j, share] for j in range(len(v))]
        loss -= weights[i] * label * np.log(softmax(np.array(scores))[i])
    return float(loss)
