"""Dropout: in training, random outputs of hidden layers are dropped, and the others scaled up.

    A' = A * m / (1 - rate),   m = 0 with probability `rate`, else 1
    dA = dA' * m / (1 - rate)

Inverted dropout: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, "Dropout: a simple way to prevent
neural networks from overfitting", JMLR 15, 2014. A dropped output is 0 after a relu, and so is its gradient
by the relu's own rule: no mask is stored.

m is a function of (seed, batch number, layer, position) only: element i of the stream of splitmix64
(Steele, Lea, Flood, OOPSLA 2014) seeded by the first three. So it does not depend on threads, and a resumed
run draws the same masks.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import GAMMA, mix64
from ctr_ps.ctr_model.jit import kernel

Floats = NDArray[np.float32]


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
