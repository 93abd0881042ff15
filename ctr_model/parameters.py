"""Dense parameters: tensors that lie one after the other in one flat vector."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class ModelInputError(ValueError):
    """A batch, its embeddings, its parameters or its buffers do not fit the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A tensor of dense parameters, a stretch of the flat vector.

    Attributes:
        name: Of the tensor.
        shape: Of the tensor, row-major in the vector.
        init_std: It starts normal with this standard deviation; 0: zeros.
    """

    name: str
    shape: tuple[int, ...]
    init_std: float


class FlatLayout:
    """Where each segment lies in the flat vector."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._shapes = [segment.shape for segment in segments]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._bounds = list(accumulate(sizes, initial=0))

    @property
    def length(self) -> int:
        """Elements of the vector."""
        return self._bounds[-1]

    def views(self, vector: Floats) -> list[Floats]:
        """Returns the segments of float32[P] `vector` as tensors that share its memory.

        Raises:
            ModelInputError: If `vector` has another length.
        """
        if vector.shape != (self.length,):
            raise ModelInputError(
                f"the model has {self.length} dense parameters, the vector has shape {vector.shape}"
            )
        return [
            vector[start:stop].reshape(shape)
            for (start, stop), shape in zip(pairwise(self._bounds), self._shapes, strict=True)
        ]
