"""A multilayer perceptron: fully connected layers with relu between them.

    A0 = X,   Ai = relu(A(i-1) Wi + bi),   out = A(n-1) Wn + bn

In training each Ai may have dropout. Initial weights are normal with standard deviation 1/sqrt(fan-in),
biases zero.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ctr_ps.ctr_model.layers.dropout import Dropout
from ctr_ps.ctr_model.layers.linear import add_bias, add_bias_relu, relu_backward, sum_rows
from ctr_ps.ctr_model.layers.products import NewProduct, float32_product
from ctr_ps.ctr_model.parameters import Floats, Segment, Tensors


class MlpBuffers:
    """Buffers of one step: input X, outputs of the layers, and gradients of all but the last output."""

    def __init__(
        self,
        widths: Sequence[int],
        max_batch_size: int,
        new_product: NewProduct,
        dropout: Dropout | None = None,
        shared_input: Floats | None = None,
    ) -> None:
        self.dropout = dropout
        self.first_hidden = 0 if dropout is None else dropout.take_layers(len(widths) - 2)
        self.products = [new_product(*shape, max_batch_size) for shape in pairwise(widths)]
        self._outputs = [np.empty((max_batch_size, width), np.float32) for width in widths]
        if shared_input is not None:
            self._outputs[0] = shared_input
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

    def __init__(self, widths: Sequence[int], *, name: str = "fc") -> None:
        self.widths = tuple(widths)
        self.segments = tuple(
            segment
            for i, (fan_in, width) in enumerate(pairwise(widths), start=1)
            for segment in (
                Segment(name=f"{name}{i}.weight", shape=(fan_in, width), init_std=fan_in**-0.5),
                Segment(name=f"{name}{i}.bias", shape=(width,), init_std=0.0),
            )
        )

    def buffers(
        self,
        max_batch_size: int,
        new_product: NewProduct = float32_product,
        dropout: Dropout | None = None,
        shared_input: Floats | None = None,
    ) -> MlpBuffers:
        """Returns buffers for batches of up to `max_batch_size` examples.

        `shared_input` is the X float32[max_batch_size, n] of several perceptrons; None: it has its own.
        """
        return MlpBuffers(self.widths, max_batch_size, new_product, dropout, shared_input)

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
