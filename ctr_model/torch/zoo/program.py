"""A network given as a list of operations, as a static program of PaddlePaddle is (docs/fleet.md)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ctr_model.torch.batch import Batch
from ctr_ps.ctr_model.torch.embedding import SlotEmbedding

ELEMENTWISE: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(1),
    "tanh": torch.tanh,
    "square": torch.square,
}

_INITIALIZERS: Mapping[str, Callable[..., Tensor]] = {
    "normal": nn.init.normal_,
    "truncated_normal": lambda x, mean, std: nn.init.trunc_normal_(
        x, mean, std, mean - 2 * std, mean + 2 * std
    ),
    "uniform": nn.init.uniform_,
    "constant": nn.init.constant_,
}


class Program(nn.Module):
    """Computes the logits by operations on earlier results, each float32[B, W]; the last one is the logits.

    An operation has its name `op`, its `width` W, `inputs`, which are indices of operations, and:

    - "dense": the dense columns
    - "embedding": `slot`, `table`, `pooling`, `init_range`
    - "fc": `weight` and `bias`: an initializer's name and arguments, none of them for that of PyTorch; `bias`
      null: no bias
    - "scale": `factor`
    - "dropout": `rate`
    - "concat": of the inputs; "sum": over W, float32[B, 1]; "log_odds": of two classes, x_1 - x_0
    - the names of `ELEMENTWISE`
    """

    def __init__(self, schema: Schema, *, operations: Sequence[Mapping[str, Any]]) -> None:
        super().__init__()
        if not operations:
            raise ValueError("operations is empty, expected those of a network")
        self.operations = operations
        last = operations[-1]
        if last["op"] == "fc" and last["width"] == 1 and last["bias"] == []:
            self.logit_biases = (
                f"layers.{len(operations) - 1}.bias",
            )  # which starts at the click rate
        self.layers = nn.ModuleDict()
        self.embeddings = nn.ModuleDict()  # one for each table and pooling, whatever the slots
        # of an operation: its embedding, and the slot there
        self._places: dict[int, tuple[str, int]] = {}
        slots: dict[str, list[str]] = {}
        names: dict[tuple[str, str], str] = {}
        for index, each in enumerate(operations):
            match each["op"]:
                case "embedding":
                    # The name of a table may be none of a module.
                    kind = (each["table"], each["pooling"])
                    name = names.setdefault(kind, str(len(names)))
                    self._places[index] = (name, len(slots.setdefault(name, [])))
                    slots[name].append(each["slot"])
                case "fc":
                    inputs = operations[each["inputs"][0]]["width"]
                    layer = nn.Linear(inputs, each["width"], bias=each["bias"] is not None)
                    for parameter in ("weight", "bias"):
                        if each[parameter]:
                            initializer, *arguments = each[parameter]
                            _INITIALIZERS[initializer](getattr(layer, parameter), *arguments)
                    self.layers[str(index)] = layer
                case "dropout":
                    self.layers[str(index)] = nn.Dropout(each["rate"])
        for index, (name, _) in self._places.items():
            if name not in self.embeddings:
                of = operations[index]
                self.embeddings[name] = SlotEmbedding(
                    slots[name],
                    dim=of["width"],
                    pooling=of["pooling"],
                    init_range=of["init_range"],
                    table=of["table"],
                )

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits float32[B, 1]."""
        rows = {name: embedding(batch) for name, embedding in self.embeddings.items()}
        values: list[Tensor] = []
        for index, each in enumerate(self.operations):
            inputs = [values[i] for i in each["inputs"]]
            match each["op"]:
                case "dense":
                    value = batch.dense
                case "embedding":
                    name, slot = self._places[index]
                    value = rows[name][:, slot]
                case "fc" | "dropout":
                    value = self.layers[str(index)](inputs[0])
                case "concat":
                    value = torch.cat(inputs, 1)
                case "sum":
                    value = inputs[0].sum(1, keepdim=True)
                case "scale":
                    value = inputs[0] * each["factor"]
                case "log_odds":
                    value = inputs[0][:, 1:] - inputs[0][:, :1]
                case op:
                    value = ELEMENTWISE[op](*inputs)
            values.append(value)
        return values[-1]
