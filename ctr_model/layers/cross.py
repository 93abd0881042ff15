"""The cross network of DCN-v2: each layer multiplies its input with the input of the network.

    forward    P = X W + b,   X' = X0 * P + X                 * element by element, X0 the first X
    backward   dP = dX' * X0,   db = sum of dP over examples,   dX = dX' + dP W^T,   dX0 += dX' * P

W is [n, n], or of low rank the product of two factors, [n, rank] and [rank, n]. Initial factors are normal
with standard deviation 1/sqrt(fan-in), biases zero.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.layers.products import NewProduct, float32_product
from ctr_ps.ctr_model.parameters import Floats, Segment, Tensors


class CrossBuffers:
    """Buffers of one step: outputs of the layers, their products P, and gradients.

    `outputs` excludes the input or the last output: it is a buffer of the neighbouring layer.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_layers: int,
        max_batch_size: int,
        new_product: NewProduct,
    ) -> None:
        self.factors = [
            [new_product(*shape, max_batch_size) for shape in pairwise(widths)]
            for _ in range(num_layers)
        ]

        def matrix(width: int) -> Floats:
            return np.empty((max_batch_size, width), np.float32)

        self._outputs = [matrix(widths[0]) for _ in range(num_layers)]
        self._products = [[matrix(width) for width in widths[1:]] for _ in range(num_layers)]
        self._grads = [matrix(width) for width in widths]
        self._first_grad = matrix(widths[0])

    def outputs(self, size: int) -> list[Floats]:
        """Returns float32[B, n] of each layer for a batch of `size` examples."""
        return [output[:size] for output in self._outputs]

    def products(self, layer: int, size: int) -> list[Floats]:
        """Returns the product with each factor of a layer; the last is P."""
        return [product[:size] for product in self._products[layer]]

    def grads(self, size: int) -> list[Floats]:
        """Returns the gradients of one layer's X through P, and of its products."""
        return [grad[:size] for grad in self._grads]

    def first_grad(self, size: int) -> Floats:
        """Returns the gradient of X0 through its products with P."""
        return self._first_grad[:size]


class Cross:
    """A network of cross layers."""

    def __init__(
        self, width: int, num_layers: int, *, rank: int | None = None, name: str = "cross"
    ) -> None:
        self._widths = (width, width) if rank is None else (width, rank, width)
        self._num_layers = num_layers
        factors = ("weight",) if rank is None else ("weight_in", "weight_out")
        self._stride = len(factors) + 1
        self.segments = tuple(
            segment
            for i in range(1, num_layers + 1)
            for segment in (
                *(
                    Segment(name=f"{name}{i}.{factor}", shape=shape, init_std=shape[0] ** -0.5)
                    for factor, shape in zip(factors, pairwise(self._widths), strict=True)
                ),
                Segment(name=f"{name}{i}.bias", shape=(width,), init_std=0.0),
            )
        )

    def buffers(
        self, max_batch_size: int, new_product: NewProduct = float32_product
    ) -> CrossBuffers:
        """Returns buffers for batches of up to `max_batch_size` examples, with products of a precision."""
        return CrossBuffers(self._widths, self._num_layers, max_batch_size, new_product)

    def forward(self, tensors: Tensors, outputs: Sequence[Floats], buffers: CrossBuffers) -> Floats:
        """Fills `outputs[1:]` from `outputs[0]` and the tensors of `segments`; returns the last."""
        size = len(outputs[0])
        for i, (x, out) in enumerate(pairwise(outputs)):
            *factors, bias = self._of_layer(tensors, i)
            chain = [x, *buffers.products(i, size)]
            for j, factor in enumerate(factors):
                buffers.factors[i][j].forward(chain[j], factor, chain[j + 1])  # [B, n] or [B, rank]
            cross(outputs[0], x, bias, chain[-1], out)
        return outputs[-1]

    def backward(
        self,
        tensors: Tensors,
        outputs: Sequence[Floats],
        buffers: CrossBuffers,
        grad: Floats,
        tensor_grads: Tensors,
    ) -> None:
        """Fills the gradients of all tensors, and overwrites `grad`, of the last output, with that of X0."""
        size = len(grad)
        first_grad, grads = buffers.first_grad(size), buffers.grads(size)
        first_grad[:] = np.float32(0.0)
        for i in range(self._num_layers - 1, -1, -1):
            factors = self._of_layer(tensors, i)[:-1]
            *factor_grads, bias_grad = self._of_layer(tensor_grads, i)
            chain = [outputs[i], *buffers.products(i, size)]
            cross_backward(outputs[0], chain[-1], grad, first_grad, grads[-1], bias_grad)
            for j in range(len(factors) - 1, -1, -1):
                buffers.factors[i][j].backward(
                    chain[j], factors[j], grads[j + 1], factor_grads[j], grads[j]
                )
            np.add(grad, grads[0], out=grad)  # [B, n]
        np.add(grad, first_grad, out=grad)

    def _of_layer(self, tensors: Tensors, layer: int) -> Sequence[Floats]:
        return tensors[layer * self._stride : (layer + 1) * self._stride]


@kernel
def cross(first: Floats, x: Floats, bias: Floats, product: Floats, out: Floats) -> None:
    """Overwrites `out` with X' and `product` float32[B, n], X W, with P; `first` is X0."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            product[i, j] += bias[j]
            out[i, j] = first[i, j] * product[i, j] + x[i, j]


@kernel
def cross_backward(
    first: Floats,
    product: Floats,
    grad: Floats,
    first_grad: Floats,
    product_grad: Floats,
    bias_grad: Floats,
) -> None:
    """Overwrites `product_grad`, dP, and `bias_grad`, db; adds to `first_grad`, dX0; `grad` is dX'."""
    bias_grad[:] = np.float32(0.0)
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            first_grad[i, j] += grad[i, j] * product[i, j]
            g = grad[i, j] * first[i, j]
            product_grad[i, j] = g
            bias_grad[j] += g
