"""The interface between trainer and model: arrays in, gradients out.

A model declares embedding tables and segments of dense parameters. For each batch the trainer provides the
rows of the batch's unique keys and a flat vector of all dense parameters; the model fills gradients of the
same shapes. The model handles slots and pooling, the trainer keys and tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ctr_model.batch import Batch
from ctr_model.lookup import Lookup
from ctr_model.parameters import Floats, Segment

__all__ = [
    "Compute",
    "EmbeddingTable",
    "Lookup",
    "Model",
    "StepResult",
    "Workspace",
    "initial_values_of",
    "module_class_of",
]


Compute = Literal["float32", "bfloat16"]
"""Precisions of the matrix products of a gradient; parameters, sums and predictions are float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """An embedding table of the model.

    Attributes:
        name: Of the table.
        dim: Width of an embedding.
        init_range: New embeddings are uniform in [-init_range, init_range).
        slots: Slots to look up, by number from 0; None: all.
        crosses: Crosses to look up, pairs of slot numbers (ctr_model/slots.py).
        optimizer: Default optimizer of this table, as in a job: {"name": "ftrl", "learning_rate": 0.1};
            None: that of all tables. A job may override it.
    """

    name: str
    dim: int
    init_range: float = 0.0
    slots: tuple[int, ...] | None = None
    crosses: tuple[tuple[int, int], ...] = ()
    optimizer: Mapping[str, str | float] | None = None

    def __post_init__(self) -> None:
        """Converts lists to tuples."""
        if self.slots is not None:
            object.__setattr__(self, "slots", tuple(self.slots))
        object.__setattr__(
            self, "crosses", tuple((first, second) for first, second in self.crosses)
        )

    def num_slots(self, of_schema: int) -> int:
        """Returns how many slots and crosses are looked up in this table, for a schema of so many slots."""
        return (of_schema if self.slots is None else len(self.slots)) + len(self.crosses)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step besides its gradients.

    Attributes:
        loss: Summed over the examples.
        probabilities: float32[B], of a click, before the step; a view into the workspace.
    """

    loss: float
    probabilities: Floats


class Workspace(Protocol):
    """Buffers of one thread, private to the model that created them."""

    @property
    def max_batch_size(self) -> int:
        """The largest supported batch size."""
        ...


def module_class_of(model: "Model") -> type[Any] | None:
    """Returns the class of the module of PyTorch that a model is; None: it is none.

    By a member, not by the model's class: that needs PyTorch, which is an extra.
    """
    return getattr(model, "module_class", None)


def initial_values_of(model: "Model") -> Floats | None:
    """Returns the `initial_values` float32[P] that a model has; None: its segments say how they are drawn."""
    return getattr(model, "initial_values", None)


class Model(Protocol):
    """A click model. Immutable and shared by threads; each thread has its own workspace."""

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Embedding tables."""
        ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Dense parameters, in the order of the flat vector."""
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
            batch: Labels are ignored.
            lookups: By table.
            workspace: Overwritten.

        Raises:
            ModelInputError: If shapes do not match; nothing has been written then.
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

        Sums, unlike means, can be merged; optimizers divide by the number of examples.

        Args:
            params: float32[P].
            batch: Labelled examples.
            lookups: By table.
            workspace: Overwritten.
            dense_grad: float32[P], overwritten.
            sparse_grads: By table float32[N, D], overwritten.

        Raises:
            ModelInputError: If shapes do not match or labels are missing; nothing has been written then.
        """
        ...
