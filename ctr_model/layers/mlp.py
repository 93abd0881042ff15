"""A multilayer perceptron: fully connected layers with relu between them, and dropout in training.

    A0 = X,   Ai = relu(A(i-1) Wi + bi),   out = A(n-1) Wn + bn

Initial weights are normal with standard deviation 1/sqrt(fan-in), biases zero. In training each Ai may have
dropout, which drops random outputs and scales up the others:

    A' = A * m / (1 - rate),   m = 0 with probability `rate`, else 1
    dA = dA' * m / (1 - rate)

Inverted dropout: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout: a simple way to prevent
neural networks from overfitting", JMLR 15, 2014. A dropped output is 0 after a relu, and so is its gradient
by the relu's own rule: no mask is stored.

m is a function of (seed, batch number, layer, position) only: element i of the stream of splitmix64
(Steele, Lea, Flood, OOPSLA 2014) seeded by the first three. So it does not depend on threads, and a resumed
run draws the same masks.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ctr_ps.ctr_model.features import GAMMA, mix64
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.products import (
    NewProduct,
    add_bias,
    add_bias_relu,
    float32_product,
    relu_backward,
    sum_rows,
)
from ctr_ps.ctr_model.parameters import Floats, Segment, Tensors


class Dropout:
    """The masks of one thread's batches; `num_layers` have been allotted so far."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self.num_layers = 0
        self._seed = seed
        self._threshold = np.uint64(rate * 2.0**32)
        self._scale = np.float32(1.0 / (1.0 - rate))
        self._number: int | None = None

    def of_thread(self) -> "Dropout":
        """Returns a copy for another thread."""
        return Dropout(self.rate, self._seed)

    def take_layers(self, num_layers: int) -> int:
        """Allots layer numbers to `num_layers` layers, and returns the first."""
        first = self.num_layers
        self.num_layers += num_layers
        return first

    def begin(self, number: int | None) -> None:
        """Starts batch `number`; None: a prediction, without dropout."""
        self._number = number

    def forward(self, layer: int, activation: Floats) -> None:
        """Drops some of a layer's outputs float32[B, H], after a relu, in place."""
        if self._number is not None:
            key = _key(np.uint64(self._seed), np.uint64(self._number), np.uint64(layer))
            _leave_out(np.uint64(key), self._threshold, self._scale, activation)

    def backward(self, grad: Floats) -> None:
        """Scales the gradient float32[B, H] of the outputs in place; the relu zeroes the dropped ones."""
        if self._number is not None:
            np.multiply(grad, self._scale, out=grad)


@kernel
def _key(seed: np.uint64, number: np.uint64, layer: np.uint64) -> np.uint64:
    return mix64(mix64(mix64(seed + GAMMA) ^ number) ^ layer)


@kernel
def _leave_out(key: np.uint64, threshold: np.uint64, scale: np.float32, values: Floats) -> None:
    """Overwrites `values` float32[B, H] with 0 where 32 random bits are below the threshold."""
    state = key
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            state += GAMMA
            is_left_out = mix64(state) >> np.uint64(32) < threshold
            values[i, j] = np.float32(0.0) if is_left_out else values[i, j] * scale


class MlpBuffers:
    """Buffers of one step: input X, outputs of the layers, and gradients of all but the last output."""

    def __init__(
        self,
        widths: Sequence[int],
        max_batch_size: int,
        new_product: NewProduct,
        dropout: Dropout | None = None,
    ) -> None:
        self.dropout = dropout
        self.first_hidden = 0 if dropout is None else dropout.take_layers(len(widths) - 2)
        self.products = [new_product(*shape, max_batch_size) for shape in pairwise(widths)]
        self._outputs = [np.empty((max_batch_size, width), np.float32) for width in widths]
        self._grads = [np.empty((max_batch_size, width), np.float32) for width in widths[:-1]]

    def input(self, size: int) -> Floats:
        """Returns X float32[B, H] for a batch of `size` examples, to be filled before `Mlp.forward`."""
        return self._outputs[0][:size]

    def outputs(self, size: int) -> list[Floats]:
        """Returns float32[B, H] of each layer for a batch of `size` examples; the first is X."""
        return [output[:size] for output in self._outputs]

    def grads(self, size: int) -> list[Floats]:
        """Returns the gradients of `outputs(size)[:-1]`."""
        return [grad[:size] for grad in self._grads]


class Mlp:
    """A multilayer perceptron of given widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self.segments = tuple(
            segment
            for i, (fan_in, width) in enumerate(pairwise(widths), start=1)
            for segment in (
                Segment(name=f"fc{i}.weight", shape=(fan_in, width), init_std=fan_in**-0.5),
                Segment(name=f"fc{i}.bias", shape=(width,), init_std=0.0),
            )
        )

    def buffers(
        self,
        max_batch_size: int,
        new_product: NewProduct = float32_product,
        dropout: Dropout | None = None,
    ) -> MlpBuffers:
        """Returns buffers for batches of up to `max_batch_size`."""
        return MlpBuffers(self._widths, max_batch_size, new_product, dropout)

    def forward(self, tensors: Tensors, buffers: MlpBuffers, size: int) -> Floats:
        """Returns the output for the X of `size` examples and the tensors of `segments`."""
        outputs = buffers.outputs(size)
        last = len(outputs) - 2
        for i, (x, out) in enumerate(pairwise(outputs)):
            weight, bias = tensors[2 * i], tensors[2 * i + 1]
            buffers.products[i].forward(x, weight, out)  # [B, H]
            if i < last:
                add_bias_relu(bias, out)
                if buffers.dropout is not None:
                    buffers.dropout.forward(buffers.first_hidden + i, out)
            else:
                add_bias(bias, out)
        return outputs[-1]

    def backward(
        self, tensors: Tensors, buffers: MlpBuffers, grad: Floats, tensor_grads: Tensors
    ) -> Floats:
        """Fills the gradients of all tensors from `grad`, of the output; returns that of X."""
        outputs, grads = buffers.outputs(len(grad)), buffers.grads(len(grad))
        last = len(grads) - 1
        for i in range(last, -1, -1):  # grad: dA, or for the last layer dZ
            weight, weight_grad, bias_grad = tensors[2 * i], *tensor_grads[2 * i : 2 * i + 2]
            if i < last:
                if buffers.dropout is not None:
                    buffers.dropout.backward(grad)
                relu_backward(outputs[i + 1], grad, bias_grad)
            else:
                sum_rows(grad, bias_grad)
            buffers.products[i].backward(outputs[i], weight, grad, weight_grad, grads[i])
            grad = grads[i]
        return grad
