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


def normed(x: Array, tensors: Tensors, name: str) -> Array:
    """Layer normalization."""
    variance = sum((value - x.mean()) ** 2 for value in x) / len(x)
    return (x - x.mean()) / np.sqrt(variance + 1e-5) * tensors[f"{name}.weight"] + tensors[
        f"{name}.bias"
    ]


def mask_net(dense: Array, slots: Slots, tensors: Tensors, *, serial: bool) -> float:
    embeddings = fields(dense, slots, tensors)
    e = np.concatenate(embeddings)
    x = np.concatenate([normed(each, tensors, "norm") for each in embeddings])
    outputs, block = [], 0
    while f"blocks.{block}.0.weight" in tensors:
        mask = mlp(e, tensors, f"masks.{block}")
        product = tensors[f"blocks.{block}.0.weight"] @ (mask * x)
        outputs.append(relu(normed(product, tensors, f"blocks.{block}.1")))
        x = outputs[-1] if serial else x
        block += 1
    (logit,) = mlp(x if serial else np.concatenate(outputs), tensors, "head")
    return sigmoid(logit)


def gdcn(dense: Array, slots: Slots, tensors: Tensors) -> float:
    first = c = np.concatenate(fields(dense, slots, tensors))
    layer = 0
    while f"crosses.{layer}.weight" in tensors:
        gate = np.array([sigmoid(value) for value in tensors[f"gates.{layer}.weight"] @ c])
        c = first * linear(c, tensors, f"crosses.{layer}") * gate + c
        layer += 1
    if "deep.0.weight" in tensors:
        c = np.concatenate([c, hidden(first, tensors, "deep")])
    (logit,) = mlp(c, tensors, "head")
    return sigmoid(logit)


def wukong(dense: Array, slots: Slots, tensors: Tensors) -> float:
    x = np.array(fields(dense, slots, tensors))  # [F, D]
    layer = 0
    while f"layers.{layer}.project.weight" in tensors:
        name = f"layers.{layer}"
        y = tensors[f"{name}.project.weight"].T  # [F, rank]
        products = np.array(
            [[sum(np.dot(a, b) * weight for b, weight in zip(x, column, strict=True))
              for column in y.T] for a in x]
        )  # fmt: skip
        inside = normed(products.reshape(-1), tensors, f"{name}.interact.0")
        interacted = mlp(inside, tensors, f"{name}.interact.1").reshape(-1, x.shape[1])
        compressed = tensors[f"{name}.compress.weight"] @ x
        residual = tensors.get(f"{name}.residual.weight", np.eye(len(x))) @ x
        rows = np.concatenate([interacted, compressed]) + residual
        x = np.array([normed(row, tensors, f"{name}.norm") for row in rows])
        layer += 1
    (logit,) = mlp(x.reshape(-1), tensors, "head")
    return sigmoid(logit)


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return np.array(powers / powers.sum())


def auto_int(dense: Array, slots: Slots, tensors: Tensors, *, heads: int) -> float:
    embeddings = x = fields(dense, slots, tensors)
    layer = 0
    while f"layers.{layer}.query.weight" in tensors:
        weights = {
            name: tensors[f"layers.{layer}.{name}.weight"]
            for name in ("query", "key", "value", "residual")
        }
        size = len(weights["query"]) // heads
        found = []
        for e in x:
            mixed = []
            for head in range(heads):
                of_head = slice(head * size, (head + 1) * size)
                query = weights["query"][of_head] @ e
                shares = softmax(
                    np.array([np.dot(query, weights["key"][of_head] @ other) for other in x])
                )
                mixed.append(
                    sum(
                        share * (weights["value"][of_head] @ other)
                        for share, other in zip(shares, x, strict=True)
                    )
                )
            found.append(relu(np.concatenate(mixed) + weights["residual"] @ e))
        x = found
        layer += 1
    (logit,) = linear(np.concatenate(x), tensors, "out")
    if "deep.out.weight" in tensors:
        logit += mlp(np.concatenate(embeddings), tensors, "deep")[0]
    return sigmoid(logit)


def transformed(x: Array, tensors: Tensors, name: str, heads: int) -> Array:
    """A layer of a transformer over rows [n, D], with queries, keys and values in one matrix."""
    first = np.array([normed(row, tensors, f"{name}.norm1") for row in x])
    query, key, value = (
        (first @ weight.T + bias)
        for weight, bias in zip(
            np.split(tensors[f"{name}.self_attn.in_proj_weight"], 3),
            np.split(tensors[f"{name}.self_attn.in_proj_bias"], 3),
            strict=True,
        )
    )
    size = x.shape[1] // heads
    mixed = np.zeros_like(x)
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        for i in range(len(x)):
            shares = softmax(query[i, own] @ key[:, own].T / np.sqrt(size))
            mixed[i, own] = shares @ value[:, own]
    rows = []
    for row, of_row in zip(x, mixed, strict=True):
        s = row + linear(of_row, tensors, f"{name}.self_attn.out_proj")
        inside = linear(normed(s, tensors, f"{name}.norm2"), tensors, f"{name}.linear1")
        out = linear(np.where(inside > 0, inside, 0.01 * inside), tensors, f"{name}.linear2")
        rows.append(s + out)
    return np.array(rows)


def bst(
    dense: Array,
    slots: Slots,
    tensors: Tensors,
    *,
    history: int,
    target: int,
    max_length: int,
    heads: int,
) -> float:
    """With one history."""
    embeddings = [rows.sum(axis=0) for rows in slots["embedding"]]
    rows = slots["embedding"][history][-max_length:]
    positions = tensors["positions.0"]
    latest_last = positions[: len(rows)][::-1]
    x = np.concatenate([rows + latest_last, [embeddings[target] + positions[-1]]])
    layer = 0
    while f"transformers.0.{layer}.norm1.weight" in tensors:
        x = transformed(x, tensors, f"transformers.0.{layer}", heads)
        layer += 1
    embeddings[history] = x[-1]
    (logit,) = mlp(np.concatenate([dense, *embeddings]), tensors, "mlp")
    return sigmoid(logit)
