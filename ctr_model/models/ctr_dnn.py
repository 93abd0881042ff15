"""CTR-DNN: embeddings and numbers through three wide layers.

    X = [ dense | sum-pooled embedding of slot 1 | ... | of slot S ]          [B, num_dense + S * D]
    A1 = relu(X W1 + b1)   A2 = relu(A1 W2 + b2)   A3 = relu(A2 W3 + b3)      [B, H]
    softmax(A3 W4 + b4) over (no click, click)                                [B, 2]

The network of PaddlePaddle's CTR tutorial: D = 10, H = 400, weights normal with standard deviation
1/sqrt(fan-in), biases zero, cross entropy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ctr_model.batch import Batch
from ctr_model.layers.embedding import pool_slots, scatter_slots
from ctr_model.layers.linear import add_bias, add_bias_relu, relu_backward, sum_rows
from ctr_model.losses import click_probabilities, cross_entropy
from ctr_model.models.model import (
    EmbeddingTable,
    FlatLayout,
    Floats,
    Lookup,
    ModelInputError,
    Segment,
    StepResult,
    Workspace,
)

CLASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CtrDnnConfig:
    """Sizes of the network.

    Attributes:
        num_dense: Dense columns of a batch.
        num_slots: S, slots of a batch.
        dim: D, width of the embeddings.
        hidden: Widths of the hidden layers.
        init_range: Embeddings start uniform in [-init_range, init_range).
        table: Name of the table of embeddings.
    """

    num_dense: int
    num_slots: int
    dim: int = 10
    hidden: tuple[int, ...] = (400, 400, 400)
    init_range: float = 0.01
    table: str = "embedding"

    def __post_init__(self) -> None:
        if self.dim < 1 or not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"dim is {self.dim!r} and hidden is {self.hidden!r}, expected widths of at least 1"
            )
        if not self.init_range >= 0:
            raise ValueError(f"init_range is {self.init_range!r}, expected a number >= 0")

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of the input, of each hidden layer, and of the output."""
        return (self.num_dense + self.num_slots * self.dim, *self.hidden, CLASSES)


class CtrDnnWorkspace:
    """The matrices of one step: outputs of the layers (first the input X) and their gradients."""

    def __init__(self, widths: tuple[int, ...], max_batch_size: int) -> None:
        self.widths = widths
        self.max_batch_size = max_batch_size
        self._outputs = [np.empty((max_batch_size, width), np.float32) for width in widths]
        self._grads = [np.empty((max_batch_size, width), np.float32) for width in widths]
        self._probabilities = np.empty(max_batch_size, np.float32)

    def views(self, size: int) -> tuple[list[Floats], list[Floats], Floats]:
        """Returns outputs, gradients and probabilities of a batch of `size` examples."""
        return (
            [output[:size] for output in self._outputs],
            [grad[:size] for grad in self._grads],
            self._probabilities[:size],
        )


class CtrDnn:
    """The model of the module's docstring."""

    def __init__(self, config: CtrDnnConfig) -> None:
        self._config = config
        layers = list(enumerate(pairwise(config.widths), start=1))
        self.tables = (
            EmbeddingTable(name=config.table, dim=config.dim, init_range=config.init_range),
        )
        self.segments = tuple(
            segment
            for i, (fan_in, width) in layers
            for segment in (
                Segment(name=f"fc{i}.weight", shape=(fan_in, width), init_std=fan_in**-0.5),
                Segment(name=f"fc{i}.bias", shape=(width,), init_std=0.0),
            )
        )
        self._layout = FlatLayout(self.segments)

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector of parameters."""
        return self._layout.length

    def workspace(self, max_batch_size: int) -> CtrDnnWorkspace:
        """Returns buffers for batches of up to `max_batch_size` examples."""
        return CtrDnnWorkspace(self._config.widths, max_batch_size)

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B]; see `Model`."""
        lookup = self._fitting_lookup(batch, lookups)
        outputs, _, probabilities = self._buffers(workspace, batch.size)
        self._forward(self._layout.views(params), batch, lookup, outputs)
        click_probabilities(outputs[-1], probabilities)
        return probabilities

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        """Computes the gradients of the loss summed over the examples; see `Model`."""
        if batch.labels is None:
            raise ModelInputError("a gradient needs labels, and this batch has none")
        _require_equal("number of labels", batch.labels.size, batch.size)
        lookup = self._fitting_lookup(batch, lookups)
        outputs, grads, probabilities = self._buffers(workspace, batch.size)
        tensors, tensor_grads = self._layout.views(params), self._layout.views(dense_grad)
        sparse_grad = sparse_grads[self._config.table]
        _require_equal("shape of the sparse gradient", sparse_grad.shape, lookup.rows.shape)

        self._forward(tensors, batch, lookup, outputs)
        loss = cross_entropy(outputs[-1], batch.labels, probabilities, grads[-1])
        self._backward(tensors, outputs, grads, tensor_grads)
        scatter_slots(
            grads[0],
            lookup.inverse,
            batch.offsets,
            batch.num_slots,
            self._config.num_dense,
            sparse_grad,
        )
        return StepResult(loss, probabilities)

    def _fitting_lookup(self, batch: Batch, lookups: Mapping[str, Lookup]) -> Lookup:
        """Returns the lookup of the model's table; kernels test no bounds, so all shapes must fit."""
        config = self._config
        _require_equal("number of dense columns", batch.dense.shape[1], config.num_dense)
        _require_equal("number of slots", batch.num_slots, config.num_slots)
        _require_equal("length of offsets", batch.offsets.size, batch.size * config.num_slots + 1)
        _require_equal("last offset", int(batch.offsets[-1]), batch.keys.size)
        lookup = lookups[config.table]
        _require_equal("length of inverse", lookup.inverse.size, batch.keys.size)
        _require_equal("width of the rows", lookup.rows.shape[1], config.dim)
        return lookup

    def _buffers(
        self, workspace: Workspace, size: int
    ) -> tuple[list[Floats], list[Floats], Floats]:
        if not isinstance(workspace, CtrDnnWorkspace) or workspace.widths != self._config.widths:
            raise ModelInputError("the workspace is another model's: ask this one for a workspace")
        if size > workspace.max_batch_size:
            raise ModelInputError(
                f"the batch has {size} examples, the workspace holds {workspace.max_batch_size}"
            )
        return workspace.views(size)

    def _forward(
        self,
        tensors: list[Floats],
        batch: Batch,
        lookup: Lookup,
        outputs: list[Floats],
    ) -> None:
        num_dense = self._config.num_dense
        outputs[0][:, :num_dense] = batch.dense
        pool_slots(
            lookup.rows, lookup.inverse, batch.offsets, batch.num_slots, num_dense, outputs[0]
        )
        last = len(outputs) - 2
        for i, (x, out) in enumerate(pairwise(outputs)):
            weight, bias = tensors[2 * i], tensors[2 * i + 1]
            np.matmul(x, weight, out=out)  # [B, H]
            if i < last:
                add_bias_relu(bias, out)
            else:
                add_bias(bias, out)

    def _backward(
        self,
        tensors: list[Floats],
        outputs: list[Floats],
        grads: list[Floats],
        tensor_grads: list[Floats],
    ) -> None:
        """Fills `grads[:-1]` and the gradients of all tensors, from `grads[-1]`."""
        last = len(outputs) - 2
        for i in range(last, -1, -1):
            weight_grad, bias_grad = tensor_grads[2 * i], tensor_grads[2 * i + 1]
            grad = grads[i + 1]  # [B, H]: dA, or for the last layer dZ
            if i < last:
                relu_backward(outputs[i + 1], grad, bias_grad)
            else:
                sum_rows(grad, bias_grad)
            np.matmul(outputs[i].T, grad, out=weight_grad)  # [fan_in, H]
            np.matmul(grad, tensors[2 * i].T, out=grads[i])  # [B, fan_in]


def _require_equal(what: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise ModelInputError(f"{what} is {actual!r}, the model expects {expected!r}")
