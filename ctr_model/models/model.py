"""The seam between a trainer and a model: arrays in, gradients out.

A model declares tables of embeddings and segments of dense parameters. For each batch the trainer brings
the rows of the batch's unique keys and one flat vector with all dense parameters; the model fills gradients
of the same shapes. Slots and pooling are the model's business, keys and tables the trainer's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch

Floats = NDArray[np.float32]


class ModelInputError(ValueError):
    """A batch, its embeddings, its parameters or its buffers do not fit the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """A table that the model looks keys up in.

    Attributes:
        name: Of the table.
        dim: Width of an embedding.
        init_range: New embeddings are uniform in [-init_range, init_range).
    """

    name: str
    dim: int
    init_range: float


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


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a batch reads from one table.

    Attributes:
        rows: float32[N, D], the embeddings of the batch's unique keys.
        inverse: int32[L]; `batch.keys[i]` is unique key `inverse[i]`.
    """

    rows: Floats
    inverse: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step says besides its gradients.

    Attributes:
        loss: Summed over the examples.
        probabilities: float32[B], of a click, before the step; a view into the workspace.
    """

    loss: float
    probabilities: Floats


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


class Workspace(Protocol):
    """The buffers of one thread's steps; only the model that made it looks inside."""

    @property
    def max_batch_size(self) -> int:
        """Examples of the largest batch that fits."""
        ...


class Model(Protocol):
    """A model of clicks. Immutable and shared by threads; each thread has its own workspace."""

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """The tables it looks keys up in, each with all keys of a batch."""
        ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Its dense parameters, in the order of the flat vector."""
        ...

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector."""
        ...

    def workspace(self, max_batch_size: int) -> Workspace:
        """Returns buffers for batches of up to `max_batch_size` examples."""
        ...

    def predict(
        self, params: Floats, batch: Batch, lookups: Mapping[str, Lookup], workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B], a view into the workspace.

        Args:
            params: float32[P].
            batch: Its labels are not read.
            lookups: By table.
            workspace: Overwritten.

        Raises:
            ModelInputError: If shapes do not fit; nothing has been written then.
        """
        ...

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Mapping[str, Lookup],
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: Mapping[str, Floats],
    ) -> StepResult:
        """Computes the gradients of the loss SUMMED over the batch's examples.

        Whoever applies them divides by the number of examples: sums can be merged, means cannot.

        Args:
            params: float32[P].
            batch: Labelled examples.
            lookups: By table.
            workspace: Overwritten.
            dense_grad: float32[P], overwritten.
            sparse_grads: By table float32[N, D], overwritten.

        Raises:
            ModelInputError: If shapes do not fit or labels are missing; nothing has been written then.
        """
        ...
