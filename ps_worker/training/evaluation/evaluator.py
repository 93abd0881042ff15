"""Evaluation: one function for the end of training and for `ps-worker infer`, so figures agree.

Its store is that of a run, or a `SavedStore`.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Required, cast

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.models.checks import errors_with_shapes, require_probabilities
from ctr_ps.ctr_model.models.model import Model, Task, origin_of, tasks_of
from ctr_ps.ctr_model.parameters import Lookups
from ctr_ps.protos.errors import CheckpointError, GradientError, ProtocolError
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Future, Missing, ParameterReader, Pulled, Version
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.job.model import DENSE_BLOCK
from ctr_ps.ps_worker.training.evaluation.breakdown import Breakdown, BreakdownFigures
from ctr_ps.ps_worker.training.lookups import keys_of_batch

logger = logging.getLogger(__name__)

OnPredictions = Callable[[NDArray[np.float32]], None]


class Evaluation(ClickMetrics):
    """Metrics of a model's predictions, with several tasks those of the first, the click.

    `tasks` has the metrics of each task by name; empty for a model of one label.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tasks = {task.name: ClickMetrics() for task in tasks_of(model)}
        self._model = model
        self._values: dict[str, NDArray[np.int64]] = {}  # by table

    def count_unknown(self, lookups: Lookups) -> None:
        """Adds to the numbers of values of each slot, and of those without a row, which reads zeros."""
        for name, lookup in lookups.items():
            slots = np.arange(lookup.offsets.size - 1) % lookup.num_slots
            slots = np.repeat(slots, np.diff(lookup.offsets))
            is_unknown = ~np.any(lookup.rows, axis=1)[lookup.inverse]
            counts = self._values.setdefault(name, np.zeros((2, lookup.num_slots), np.int64))
            for row, each in enumerate((slots, slots[is_unknown])):
                counts[row] += np.bincount(each, minlength=lookup.num_slots)

    def unknown_values(self) -> dict[str, float]:
        """Returns the share of the values of a slot that no table has weights for, if there are some."""
        origin = origin_of(self._model)
        shares: dict[str, float] = {}
        for table in self._model.tables:
            values, unknown = self._values.get(table.name, np.zeros((2, 0), np.int64)).tolist()
            plain = range(len(values) - len(table.crosses)) if table.slots is None else table.slots
            for slot, total, count in zip(plain, values, unknown, strict=False):
                name = f"slot {slot + 1}" if origin is None else origin.schema.slots[slot]
                share = round(count / max(total, 1), 4)
                shares[name] = min(shares.get(name, share), share)
        return {name: share for name, share in shares.items() if share}

    def warn_of_unknown(self) -> None:
        """Logs the slots most of whose values are unknown."""
        if most := {name: share for name, share in self.unknown_values().items() if share > 0.5}:
            logger.warning(
                "most values of slots are unknown to the model: %s; are they written as in the data that it "
                "was trained on? '684' and '684.0' are two values",
                ", ".join(f"{share:.1%} of {name!r}" for name, share in most.items()),
            )


def evaluate(
    store: ParameterReader,
    model: Model,
    batches: Iterable[Batch],
    *,
    batch_size: int,  # size of most batches; a larger one costs more memory from then on
    num_threads: int = 1,  # threads of matrix products
    # called in order with each batch and its probabilities, float32[B] or float32[B, K]; a view,
    # valid only during the call
    on_predictions: OnPredictions | None = None,
    # collects the examples that have labels, with the probabilities of a click
    breakdown: Breakdown | None = None,
) -> Evaluation:
    """Predicts every example, and returns the metrics of those that have labels.

    It only reads the store; a key without a row reads zeros. Raises GradientError if a prediction is not a
    probability.
    """
    params: Values = np.empty(model.num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: params}).result()
    workspace = model.workspace(batch_size)
    tasks = tasks_of(model)
    metrics = Evaluation(model)
    with threadpool_limits(limits=num_threads, user_api="blas"):
        for batch in batches:
            keys = keys_of_batch(batch, model.tables)
            if batch.size > workspace.max_batch_size:
                workspace = model.workspace(batch.size)
            rows = store.pull_sparse(keys.unique, missing=Missing.ZEROS).result().rows
            lookups = keys.lookups(rows)
            metrics.count_unknown(lookups)
            with errors_with_shapes(model, "predict", batch, lookups):
                predictions = model.predict(params, batch, lookups, workspace)
            require_probabilities("predict", predictions, batch, len(tasks))
            if on_predictions is not None:
                on_predictions(predictions)
            if batch.labels is not None:
                of_click = np.ascontiguousarray(predictions[:, 0]) if tasks else predictions
                _add(metrics, batch.labels, of_click, batch.weights)
                _add_tasks(metrics, tasks, batch, predictions)
                if breakdown is not None:
                    breakdown.add(batch, of_click)
    return metrics


class Figures(BreakdownFigures):
    """Figures of an evaluation, by their names in summaries; None instead of nan."""

    auc: Required[float | None]
    log_loss: Required[float | None]
    base_log_loss: Required[float | None]
    accuracy: Required[float | None]
    calibration: Required[float | None]
    test_examples: Required[int]
    tasks: dict[str, "Figures"]  # of a model of several labels


def figures(metrics: ClickMetrics, breakdown: Breakdown | None = None) -> Figures:
    """Returns the figures of an evaluation."""
    tasks = metrics.tasks if isinstance(metrics, Evaluation) else {}
    found: dict[str, object] = {
        "auc": metrics.auc(),
        "log_loss": metrics.log_loss(),
        "base_log_loss": metrics.base_log_loss(),
        "accuracy": metrics.accuracy(),
        "calibration": metrics.calibration(),
        "test_examples": metrics.examples,
        **({"unknown_values": metrics.unknown_values()} if isinstance(metrics, Evaluation) else {}),
        **({} if breakdown is None else breakdown.figures()),
    }
    if any(of_task.examples for of_task in tasks.values()):
        found["tasks"] = {name: figures(of_task) for name, of_task in tasks.items()}
    return cast(Figures, json_value(found))


def json_value(value: object) -> object:
    """Returns a value with nan and infinity replaced by None, as JSON has neither."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: json_value(each) for name, each in value.items()}
        case list() | tuple():
            return [json_value(each) for each in value]
        case _:
            return value


def _add_tasks(
    metrics: Evaluation, tasks: Sequence[Task], batch: Batch, predictions: NDArray[np.float32]
) -> None:
    labels = batch.all_labels
    if labels is None or batch.other_labels is None:
        return
    for k, task in enumerate(tasks):
        counts = (labels[:, task.given] == 1).all(axis=1)
        _add(
            metrics.tasks[task.name],
            labels[:, task.labels].prod(axis=1)[counts],
            predictions[counts, k],
            None if batch.weights is None else batch.weights[counts],
        )


def _add(
    metrics: ClickMetrics,
    labels: NDArray[np.float32],
    predictions: NDArray[np.float32],
    weights: NDArray[np.float32] | None,
) -> None:
    try:
        metrics.add(labels, predictions, weights)
    except ValueError as error:
        raise GradientError(f"{error}; lower the learning rate, or load an older model") from error


@dataclass(frozen=True, slots=True)
class SavedStore:
    """A saved model as a `ParameterReader`, always at version 0."""

    saved: SavedModel

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `ParameterReader`; only with `Missing.ZEROS`."""
        if missing is not Missing.ZEROS:
            raise ProtocolError(f"keys without a saved row read as zeros, not as {missing.name}")
        return Answered(Pulled({name: self.saved.read(name, keys[name]) for name in keys}, 0))

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `ParameterReader`."""
        for name, vector in into.items():
            saved = self.saved.dense.get(name)
            if saved is None or saved.shape != vector.shape:
                raise CheckpointError(
                    f"checkpoint {self.saved.checkpoint.url} has no dense block {name!r} of length "
                    f"{vector.size}: it belongs to another model"
                )
            vector[:] = saved
        return Answered(0)
