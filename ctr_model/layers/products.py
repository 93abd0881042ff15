"""Matrix products of layers: an interface, so that one place chooses their precision.

    forward    Z = X W
    backward   dW = X^T dZ,  dX = dZ W^T

Layers hold float32 matrices on both sides; what is between them is up to the product.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ctr_model.layers.linear import outer
from ctr_model.parameters import Floats


class Product(Protocol):
    """The product of a layer's input with one weight; of one thread."""

    def forward(self, x: Floats, weight: Floats, out: Floats) -> None:
        """Overwrites `out` float32[B, H] with X W, for `x` float32[B, n] and `weight` float32[n, H]."""
        ...

    def backward(
        self, x: Floats, weight: Floats, grad: Floats, weight_grad: Floats, x_grad: Floats
    ) -> None:
        """Overwrites the gradients of X and W; called after `forward` with the same two.

        Args:
            x: float32[B, n], X.
            weight: float32[n, H], W.
            grad: float32[B, H], dZ.
            weight_grad: float32[n, H], overwritten with dW.
            x_grad: float32[B, n], overwritten with dX.
        """
        ...


NewProduct = Callable[[int, int, int], Product]
"""Makes the product of a layer and thread, from n, H and the largest B."""


def float32_product(fan_in: int, width: int, max_batch_size: int) -> Product:
    """Returns a product in float32 by BLAS, of any size; it needs no memory."""
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
