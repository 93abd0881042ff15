"""The seam between a trainer and a model: arrays in, gradients out.

A model declares tables of embeddings and segments of dense parameters. For each batch the trainer brings
the rows of the batch's unique keys and one flat vector with all dense parameters; the model fills gradients
of the same shapes. Slots and pooling are the model's business, keys and tables the trainer's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ctr_model.batch import Batch
from ctr_model.lookup import Lookup
from ctr_model.parameters import Floats, Segment

__all__ = ["EmbeddingTable", "Lookup", "Model", "StepResult", "Workspace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """A table that the model looks keys up in.

    Attributes:
        name: Of the table.
        dim: Width of an embedding.
        init_range: New embeddings are uniform in [-init_range, init_range).
        slots: Slots that are looked up in it, by number from 0; None: all.
        crosses: Pairs of slots whose values together are looked up in it (ctr_model/slots.py).
        optimizer: What suits this table, as a job writes it: {"name": "ftrl", "learning_rate": 0.1};
            None: what the job has for all tables. The job has the last word.
    """

    name: str
    dim: int
    init_range: float = 0.0
    slots: tuple[int, ...] | None = None
    crosses: tuple[tuple[int, int], ...] = ()
    optimizer: Mapping[str, str | float] | None = None

    def __post_init__(self) -> None:
        """Takes lists for tuples: who writes a model need not think of it."""
        if self.slots is not None:
            object.__setattr__(self, "slots", tuple(self.slots))
        object.__setattr__(
            self, "crosses", tuple((first, second) for first, second in self.crosses)
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step says besides its gradients.

    Attributes:
        loss: Summed over the examples.
        probabilities: float32[B], of a click, before the step; a view into the workspace.
    """

    loss: float
    probabilities: Floats


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
        """The tables it looks keys up in."""
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
