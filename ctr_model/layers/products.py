"""Kernels and matrix products of fully connected layers.

    forward    Z = X W + b,  A = max(Z, 0)
    backward   dZ = dA where A > 0,  db = sum of dZ over examples,  dW = X^T dZ,  dX = dZ W^T

A overwrites Z and dZ overwrites dA, so a hidden layer has one matrix per direction. The products are behind
an interface that chooses their precision; layers hold float32 matrices on both sides.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ctr_model.parameters import Floats


@kernel
def add_bias(bias: Floats, out: Floats) -> None:
    """Adds `bias` float32[H] to each row of `out` float32[B, H], in place."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += bias[j]


@kernel
def add_bias_relu(bias: Floats, out: Floats) -> None:
    """Adds `bias` float32[H] to each row of `out` float32[B, H] and applies relu, in place."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = max(out[i, j] + bias[j], np.float32(0.0))


@kernel
def relu_backward(activation: Floats, grad: Floats, bias_grad: Floats) -> None:
    """Overwrites `grad`, dA, with dZ, and `bias_grad` float32[H] with db; `activation` is A float32[B, H]."""
    bias_grad[:] = np.float32(0.0)
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            g = grad[i, j] if activation[i, j] > np.float32(0.0) else np.float32(0.0)
            grad[i, j] = g
            bias_grad[j] += g


@kernel
def sum_rows(grad: Floats, out: Floats) -> None:
    """Overwrites `out` float32[H] with the sum of the rows of `grad` float32[B, H]."""
    out[:] = np.float32(0.0)
    for i in range(grad.shape[0]):
        for j in range(grad.shape[1]):
            out[j] += grad[i, j]


@kernel
def outer(column: Floats, row: Floats, out: Floats) -> None:
    """Overwrites `out` float32[B, H] with the products of `column` float32[B] and `row` float32[H].

    This is `dZ W^T` for a single output; numpy's matmul takes five times as long.
    """
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = column[i] * row[j]


class Product(Protocol):
    """The product of a layer's input with one weight; of one thread."""

    def forward(self, x: Floats, weight: Floats, out: Floats) -> None:
        """Overwrites `out` float32[B, H] with X W, for `x` float32[B, n] and `weight` float32[n, H]."""

    def backward(
        self, x: Floats, weight: Floats, grad: Floats, weight_grad: Floats, x_grad: Floats
    ) -> None:
        """Overwrites dW and dX, given `grad`, dZ; follows `forward` on the same X and W."""


NewProduct = Callable[[int, int, int], Product]
"""Factory of a layer's product for one thread, from n, H and the largest B."""


def float32_product(fan_in: int, width: int, max_batch_size: int) -> Product:
    """Returns a product in float32 by BLAS, of any size."""
    return _BLAS


class _Blas:
    def forward(self, x: Floats, weight: Floats, out: Floats) -> None:
        np.matmul(x, weight, out=out)

    def backward(
        self, x: Floats, weight: Floats, grad: Floats, weight_grad: Floats, x_grad: Floats
    ) -> None:
        np.matmul(x.T, grad, out=weight_grad)
        if grad.shape[1] == 1:
            outer(grad.reshape(-1), weight.reshape(-1), x_grad)
        else:
            np.matmul(grad, weight.T, out=x_grad)


_BLAS = _Blas()
