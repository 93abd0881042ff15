"""Matrix products of layers, behind an interface that chooses their precision.

    forward    Z = X W
    backward   dW = X^T dZ,  dX = dZ W^T

Layers hold float32 matrices on both sides.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ctr_ps.ctr_model.layers.linear import outer
from ctr_ps.ctr_model.parameters import Floats


class Product(Protocol):
    """The product of a layer's input with one weight; of one thread."""

    def forward(self, x: Floats, weight: Floats, out: Floats) -> None:
        """Overwrites `out` float32[B, H] with X W, for `x` float32[B, n] and `weight` float32[n, H]."""
        ...

    def backward(
        self, x: Floats, weight: Floats, grad: Floats, weight_grad: Floats, x_grad: Floats
    ) -> None:
        """Overwrites dW and dX, given `grad`, dZ; follows `forward` on the same X and W."""
        ...


NewProduct = Callable[[int, int, int], Product]
"""Factory of a layer's product for one thread, from n, H and the largest B."""


def float32_product(fan_in: int, width: int, max_batch_size: int) -> Product:
    """Returns a product in float32 by BLAS, of any size."""
    return _BLAS


class _Blas:
    """Products by numpy."""

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
