"""Dense parameters: tensors concatenated in one flat vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Tensors = Sequence[Floats]
"""Dense parameters or their gradients, one per segment."""


class ModelInputError(ValueError):
    """Raised when a batch, embeddings, parameters or buffers do not match the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A tensor of dense parameters, row-major in the flat vector.

    `init_std` is the standard deviation of its normal initial values; 0: zeros.
    """

    name: str
    shape: tuple[int, ...]
    init_std: float


class FlatLayout:
    """Positions of the segments in the flat vector."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._shapes = [segment.shape for segment in segments]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._bounds = list(accumulate(sizes, initial=0))

    @property
    def length(self) -> int:
        """Length of the vector."""
        return self._bounds[-1]

    def views(self, vector: Floats) -> list[Floats]:
        """Returns the segments of `vector`, float32[P], as views; ModelInputError for another length."""
        if vector.shape != (self.length,):
            raise ModelInputError(
                f"the model has {self.length} dense parameters, the vector has shape {vector.shape}"
            )
        return [
            vector[start:stop].reshape(shape)
            for (start, stop), shape in zip(pairwise(self._bounds), self._shapes, strict=True)
        ]
