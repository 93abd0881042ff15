"""Evaluation: one function for the end of training and for `ps-worker infer`, so figures agree."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from ctr_model.metrics import ClickMetrics
from ctr_model.models.model import Model
from protos.errors import GradientError
from protos.gradients import Values
from protos.store import Missing, ParameterReader
from ps_worker.job.model import DENSE_BLOCK
from ps_worker.training.lookups import keys_of_batch

OnPredictions = Callable[[NDArray[np.float32]], None]


def evaluate(
    store: ParameterReader,
    model: Model,
    batches: Iterable[Batch],
    *,
    batch_size: int,
    on_predictions: OnPredictions | None = None,
) -> ClickMetrics:
    """Predicts every example, and returns the metrics of those that have labels.

    Reads the store as it is and changes nothing; a key without a row reads zeros.

    Args:
        store: The parameters.
        model: What to predict with.
        batches: Examples.
        batch_size: Size of most batches; a larger one costs more memory from then on.
        on_predictions: Gets each batch's click probabilities, float32[B], in order; a view, valid only
            during the call.

    Raises:
        GradientError: If a prediction is not a probability.
    """
    params: Values = np.empty(model.num_params, np.float32)
    store.pull_dense({DENSE_BLOCK: params}).result()
    workspace = model.workspace(batch_size)
    metrics = ClickMetrics()
    for batch in batches:
        keys = keys_of_batch(batch, model.tables)
        if batch.size > workspace.max_batch_size:
            workspace = model.workspace(batch.size)
        rows = store.pull_sparse(keys.unique, missing=Missing.ZEROS).result().rows
        predictions = model.predict(params, batch, keys.lookups(rows), workspace)
        if on_predictions is not None:
            on_predictions(predictions)
        if batch.labels is not None:
            _add(metrics, batch.labels, predictions)
    return metrics


def figures(metrics: ClickMetrics) -> dict[str, Any]:
    """Returns the figures of an evaluation, by their names in summaries."""
    return {
        "auc": metrics.auc(),
        "log_loss": metrics.log_loss(),
        "accuracy": metrics.accuracy(),
        "calibration": metrics.calibration(),
        "test_examples": metrics.examples,
    }


def _add(
    metrics: ClickMetrics, labels: NDArray[np.float32], predictions: NDArray[np.float32]
) -> None:
    try:
        metrics.add(labels, predictions)
    except ValueError as error:
        raise GradientError(f"{error}; lower the learning rate, or load an older model") from error
