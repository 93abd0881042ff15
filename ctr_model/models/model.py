"""The interface between trainer and model: arrays in, gradients out.

A model declares embedding tables and segments of dense parameters. For each batch the trainer provides the
rows of the batch's unique keys and a flat vector of all dense parameters; the model fills gradients of the
same shapes. The model handles slots and pooling, the trainer keys and tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ctr_model.batch import Batch
from ctr_model.lookup import EmbeddingTable, Lookup
from ctr_model.parameters import Floats, Segment

__all__ = [
    "Compute",
    "EmbeddingTable",
    "Lookup",
    "Model",
    "StepResult",
    "Task",
    "Workspace",
    "initial_biases_of",
    "initial_values_of",
    "module_class_of",
    "number_batch",
    "tasks_of",
]


Compute = Literal["float32", "bfloat16"]
"""Precisions of the matrix products of a gradient; parameters, sums and predictions are float32."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step besides its gradients.

    Attributes:
        loss: Summed over the examples, each times its weight.
        probabilities: float32[B], of a click (the first task), before the step; a view into the workspace.
    """

    loss: float
    probabilities: Floats


@dataclass(frozen=True, slots=True)
class Task:
    """One of several probabilities that a model predicts, and the rows that tell how good they are.

    Attributes:
        name: Of the probability.
        labels: Labels of the schema, by number from 0: the event is that all of them are 1.
        given: Labels that are 1 in the rows that count; the probability is under that condition.
    """

    name: str
    labels: tuple[int, ...]
    given: tuple[int, ...] = ()


class Workspace(Protocol):
    """Buffers of one thread, private to the model that created them."""

    @property
    def max_batch_size(self) -> int:
        """The largest supported batch size."""
        ...


def number_batch(workspace: Workspace, number: int) -> None:
    """Tells a workspace the number of the next batch of its worker, by which dropout draws.

    Workspaces of models without dropout may have no place for it.
    """
    if hasattr(workspace, "batch_number"):
        workspace.batch_number = number


def module_class_of(model: "Model") -> type[Any] | None:
    """Returns the class of the module of PyTorch that a model is; None: it is none.

    By a member, not by the model's class: that needs PyTorch, which is an extra.
    """
    return getattr(model, "module_class", None)


def initial_values_of(model: "Model") -> Floats | None:
    """Returns the `initial_values` float32[P] that a model has; None: its segments say how they are drawn."""
    return getattr(model, "initial_values", None)


def initial_biases_of(model: "Model", rates: Sequence[float]) -> Mapping[str, Sequence[float]]:
    """Returns the model's `initial_biases` at the rates of its tasks; without: none."""
    biases = getattr(model, "initial_biases", None)
    return {} if biases is None else biases(rates)


def tasks_of(model: "Model") -> tuple[Task, ...]:
    """Returns the `tasks` that a model has; without: it predicts one label, the first."""
    tasks: tuple[Task, ...] = getattr(model, "tasks", ())
    return tasks


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

        A model of several tasks has `tasks`, K of them, and returns float32[B, K].

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
        """Computes the gradients of the loss SUMMED over the batch's examples, each times its weight.

        Sums, unlike means, can be merged; optimizers divide by the sum of the weights, which are 1 for
        examples without.

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
