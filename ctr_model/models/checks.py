"""Checks of the inputs of models, because kernels do not check bounds, and of a user's models."""

import inspect
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model, StepResult, Task, Workspace, module_class_of
from ctr_ps.ctr_model.parameters import (
    EmbeddingTable,
    Floats,
    Lookups,
    ModelInputError,
    SparseGrads,
)
from ctr_ps.ctr_model.schema import Schema

_MAX_SHOWN = 8


def require_batch(
    schema: Schema,
    tables: Sequence[EmbeddingTable],
    batch: Batch,
    lookups: Lookups,
    workspace: Workspace,
) -> None:
    """Raises ModelInputError unless batch, lookups and workspace match the model."""
    _require_equal("number of dense columns", batch.dense.shape[1], schema.num_dense)
    _require_equal("number of slots", batch.num_slots, len(schema.slots))
    for table in tables:
        lookup, num_slots = lookups[table.name], table.num_slots(len(schema.slots))
        _require_equal(f"number of slots of table {table.name!r}", lookup.num_slots, num_slots)
        _require_equal("length of offsets", lookup.offsets.size, batch.size * num_slots + 1)
        _require_equal("length of inverse", lookup.inverse.size, int(lookup.offsets[-1]))
        width = lookup.rows.shape[1]
        _require_equal(f"width of the rows of table {table.name!r}", width, table.dim)
    if batch.size > workspace.max_batch_size:
        raise ModelInputError(
            f"the batch has {batch.size} examples, the workspace holds {workspace.max_batch_size}"
        )


def labels_of(batch: Batch, num_labels: int = 1) -> Floats:
    """Returns the labels float32[B], of several float32[B, T]; ModelInputError unless there are that many."""
    labels = batch.all_labels
    if labels is None:
        raise ModelInputError("cannot compute a gradient: the batch has no labels")
    _require_equal("number of labels", len(labels), batch.size)
    found = 1 if labels.ndim == 1 else labels.shape[1]
    if found != num_labels:
        raise ModelInputError(
            f"the model learns {num_labels} label{'' if num_labels == 1 else 's'}, but this batch has "
            f"{found}: name those of the model in the schema, as label = or labels ="
        )
    return labels


def require_tasks(name: str, schema: Schema, tasks: Sequence[Task]) -> None:
    """Raises ValueError if a model without tasks has a schema of several labels."""
    if schema.other_labels and not tasks:
        raise ValueError(
            f"{name} learns one label, but the schema has {', '.join(schema.labels)}: use esmm, mmoe, ple, "
            "pepnet, or a PyTorch module with self.tasks = schema.labels, or name one label in the schema, "
            f"such as label = {schema.label!r}"
        )


def weights_of(batch: Batch, ones: Floats) -> Floats:
    """Returns the weights float32[B], by default a part of `ones`; raises ModelInputError if too few."""
    if batch.weights is None:
        return ones[: batch.size]
    _require_equal("number of weights", batch.weights.size, batch.size)
    return np.require(batch.weights, np.float32, ["C", "W"])  # of one type for the kernels


def require_grads(lookups: Lookups, sparse_grads: SparseGrads) -> None:
    """Raises ModelInputError unless each table's gradient has the shape of its rows."""
    for name, lookup in lookups.items():
        _require_equal(
            f"shape of the gradient of table {name!r}", sparse_grads[name].shape, lookup.rows.shape
        )


@contextmanager
def errors_with_shapes(model: Model, method: str, batch: Batch, lookups: Lookups) -> Iterator[None]:
    """Turns exceptions of a user's model in `method` into a ModelInputError with line and shapes."""
    try:
        yield
    except (ModelInputError, MemoryError):
        raise
    except Exception as error:  # user code may raise anything
        if not is_own(model):
            raise
        raise ModelInputError(
            f"{method} failed{_place_in(model, error)}: {type(error).__name__}: {error}; its arguments were "
            f"{_shapes(model, batch, lookups)}"
        ) from error


def is_own(model: Model) -> bool:
    """Whether a model's class, or its module's, is the user's own."""
    return _class_of(model).__module__.partition(".")[0] != "ctr_ps"


def require_result(result: object, batch: Batch) -> None:
    """Raises ModelInputError unless `gradient` returned a valid StepResult."""
    if not isinstance(result, StepResult):
        raise ModelInputError(
            f"gradient returned a {type(result).__name__}, expected StepResult(loss, probabilities)"
        )
    require_probabilities("gradient", result.probabilities, batch)


def require_probabilities(
    method: str, probabilities: object, batch: Batch, num_tasks: int = 0
) -> None:
    """Raises ModelInputError unless these are float32[B], or float32[B, K] for several tasks."""
    found = (
        f"{probabilities.dtype}{list(probabilities.shape)}"
        if isinstance(probabilities, np.ndarray)
        else f"a {type(probabilities).__name__}"
    )
    shape = [batch.size, num_tasks] if num_tasks else [batch.size]
    if found != f"float32{shape}":
        raise ModelInputError(
            f"{method} returned probabilities as {found}, expected float32{shape} for a batch of "
            f"{batch.size} examples"
        )


_UNWRITTEN = np.uint32(0x7FC0DEAD)
"""Bits that no computation yields: a nan with a mark that survives sums."""


def mark(arrays: Iterable[Floats]) -> None:
    """Fills arrays with a mark that `require_written` detects."""
    for array in arrays:
        array.view(np.uint32)[...] = _UNWRITTEN


def require_written(method: str, arrays: Mapping[str, Floats]) -> None:
    """Raises ModelInputError if a marked array, by name, was not overwritten completely."""
    for name, array in arrays.items():
        left = int(np.count_nonzero(array.view(np.uint32) == _UNWRITTEN))
        if left:
            raise ModelInputError(
                f"{method} did not write {left} of {array.size} numbers of {name}, "
                f"{array.dtype}{list(array.shape)}: the array is not initialized, so overwrite it "
                "completely, in place (out[:] = ...), before adding to it"
            )


def _class_of(model: Model) -> type[Any]:
    return module_class_of(model) or type(model)


def _place_in(model: Model, error: Exception) -> str:
    try:
        path = inspect.getfile(_class_of(model))
    except (TypeError, OSError):  # a class without a file, as of an interpreter's input
        return ""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f" in {path}, line {lines[-1]}" if lines else ""


def _shapes(model: Model, batch: Batch, lookups: Lookups) -> str:
    tables = [
        f"table {name!r} with rows {list(lookup.rows.shape)} of {lookup.num_slots} slots"
        for name, lookup in lookups.items()
    ]
    tensors = [f"{segment.name} {list(segment.shape)}" for segment in model.segments]
    given = [f"{batch.size} examples, dense {list(batch.dense.shape)}", *tables]
    return ", ".join([*given, *tensors[:_MAX_SHOWN], *(["..."] if tensors[_MAX_SHOWN:] else [])])


def _require_equal(name: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise ModelInputError(f"{name} is {actual!r}, the model expects {expected!r}")
