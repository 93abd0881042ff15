"""The interface between trainer and model: arrays in, gradients out.

A model declares embedding tables and segments of dense parameters. For each batch the trainer provides the
rows of the batch's unique keys and a flat vector of all dense parameters; the model fills gradients of the
same shapes. The model handles slots and pooling, the trainer keys and tables.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.parameters import EmbeddingTable, Floats, Lookups, Segment, SparseGrads
from ctr_ps.ctr_model.schema import Schema

Compute = Literal["float32", "bfloat16"]
"""Precisions of the matrix products of a gradient; parameters, sums and predictions are float32."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step besides its gradients."""

    loss: float  # summed over the examples, each times its weight
    # float32[B] of a click (the first task) before the step; a view into the workspace
    probabilities: Floats


@dataclass(frozen=True, slots=True)
class Task:
    """One of several probabilities of a model, and the rows to evaluate it on."""

    name: str
    # labels of the schema, by number from 0: the event is that all of them are 1
    labels: tuple[int, ...]
    given: tuple[int, ...] = ()  # labels of the condition: only rows in which all are 1 count


class Workspace(Protocol):
    """Buffers of one thread, private to the model that created them."""

    @property
    def max_batch_size(self) -> int:
        """The largest supported batch size."""


def number_batch(workspace: Workspace, number: int) -> None:
    """Sets the number of a workspace's next batch, from which dropout draws; a no-op without dropout."""
    if hasattr(workspace, "batch_number"):
        workspace.batch_number = number


def module_class_of(model: "Model") -> type[Any] | None:
    """Returns the class of a model's PyTorch module, or None; a check of classes would import PyTorch."""
    return getattr(model, "module_class", None)


def initial_values_of(model: "Model") -> Floats | None:
    """Returns the model's `initial_values` float32[P]; None: its segments say how they are drawn."""
    return getattr(model, "initial_values", None)


def initial_biases_of(model: "Model", rates: Sequence[float]) -> Mapping[str, Sequence[float]]:
    """Returns the model's `initial_biases` for the rates of its tasks; without: none."""
    biases = getattr(model, "initial_biases", None)
    return {} if biases is None else biases(rates)


def tasks_of(model: "Model") -> tuple[Task, ...]:
    """Returns the model's `tasks`; empty for a model of one label."""
    tasks: tuple[Task, ...] = getattr(model, "tasks", ())
    return tasks


class Model(Protocol):
    """A click model. Immutable and shared by threads; each thread has its own workspace."""

    @property
    def tables(self) -> tuple[EmbeddingTable, ...]:
        """Embedding tables."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Dense parameters, in the order of the flat vector."""

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector."""

    def workspace(self, max_batch_size: int) -> Workspace:
        """Returns buffers for batches of up to `max_batch_size` examples."""

    def predict(
        self, params: Floats, batch: Batch, lookups: Lookups, workspace: Workspace
    ) -> Floats:
        """Returns click probabilities float32[B], or float32[B, K] for K `tasks`; a view into the workspace.

        `params` are float32[P], `lookups` by table. Raises ModelInputError if shapes do not match, before
        anything is written. Labels are ignored.
        """

    def gradient(
        self,
        params: Floats,
        batch: Batch,
        lookups: Lookups,
        workspace: Workspace,
        dense_grad: Floats,
        sparse_grads: SparseGrads,
    ) -> StepResult:
        """Computes the gradients of the loss SUMMED over the batch's examples, each times its weight.

        Sums, unlike means, can be merged; optimizers divide by the sum of the weights. Overwrites
        `dense_grad` float32[P] and, by table, `sparse_grads` float32[N, D]. Raises ModelInputError if shapes
        do not match or labels are missing, before anything is written.
        """


ModelClass = TypeVar("ModelClass", bound=type[Any])


@dataclass(frozen=True, slots=True)
class Origin:
    """Constructor arguments of a model."""

    schema: Schema
    options: Mapping[str, Any]


def keeps_origin(model_class: ModelClass) -> ModelClass:
    """Makes instances of a class, not of its subclasses, keep their constructor arguments."""
    init = model_class.__init__

    @functools.wraps(init)
    def keeping_init(self: Any, schema: Schema, **options: Any) -> None:
        if type(self) is model_class:
            self._origin = Origin(schema, options)
        init(self, schema, **options)

    model_class.__init__ = keeping_init
    return model_class


def origin_of(model: Model) -> Origin | None:
    """Returns the constructor arguments of a model; None if its class does not keep them."""
    return getattr(model, "_origin", None)
