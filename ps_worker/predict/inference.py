"""Offline inference: a saved model, some files, no servers."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import tasks_of
from ctr_ps.ctr_model.schema import SchemaError
from ctr_ps.protos.errors import JobError, UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    require_consent,
    schema_of_checkpoint,
)
from ctr_ps.ps_worker.data.files.content import atomic_file
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore, evaluate, figures

_DIGITS = "%.9g"  # of a prediction: with nine digits text is read as the float32 that it was


def infer(
    model_dir: str,  # a checkpoint, or a folder of checkpoints, whose newest is taken
    # patterns of files; empty: the test files of the job that trained the model
    data: Sequence[str],
    *,
    # where to write one click probability a line, in the order of the rows, after the row's id and
    # a tab if there are ids; of a model of several tasks those of all, with tabs between them. No
    # malformed row is passed over then, unless overridden: line n is that of row n
    output: Path | None = None,
    # name of the column of ids; None: the schema's, if that names one. Only for `output`
    id_column: str | None = None,
    overrides: Sequence[str] = (),  # `section.key=value`, over the job that trained the model
    # run the model's file and the command for data that the checkpoint names
    allow_code: bool = False,
) -> dict[str, Any]:
    """Predicts the rows of files with a saved model.

    Returns the number of rows, the model's digest, for labelled rows the figures of the evaluation, and for a
    model of several tasks the names of its probabilities, in the order of the columns of `output`. Raises
    CtrPsError if model, job or data are wrong.
    """
    checkpoint = Checkpoint.open(model_dir)
    strict = [] if output is None else ["data.bad_row_limit=0"]
    job = job_of_checkpoint(checkpoint, [*strict, *overrides])
    require_consent(
        checkpoint.url,
        job,
        ["model.name", "data.pipe_command"],
        allow_code=allow_code,
        overrides=overrides,
    )
    schema = schema_of_checkpoint(checkpoint)
    if id_column is not None and output is None:
        raise UsageError(
            f"--id {id_column}: ids are only written with predictions: give --output, too"
        )
    files = matching_files(data or job.data.test)
    if not files:
        raise JobError("no data to predict: give --data, or train with data.test")
    ids = None if output is None else id_column or schema.id
    try:
        schema_of_rows = replace(schema, is_for_prediction=True, id=ids)
    except SchemaError as error:
        raise UsageError(f"--id: {error}") from error
    dataset = evaluated(job, schema_of_rows, files)
    breakdown = breakdown_of(job, schema, files)()
    ids_of_batch: list[NDArray[np.object_] | None] = [None]  # of the one that is predicted

    def batches() -> Iterator[Batch]:
        for batch in dataset:
            ids_of_batch[0] = batch.ids
            yield batch

    saved = SavedModel(checkpoint, maps=True, verifies=True)
    with errors_of_model(job), _predictions_to(output, ids_of_batch) as write:
        model = model_of_checkpoint(checkpoint, job, schema)
        metrics = evaluate(
            SavedStore(saved),
            model,
            batches(),
            batch_size=job.train.batch_size,
            num_threads=job.train.thread_num,
            on_predictions=write,
            breakdown=breakdown,
        )
    metrics.warn_of_unknown()
    return {
        "rows": dataset.rows,
        "bad_rows": dataset.bad_rows,
        "model_digest": checkpoint.digest_of_files(),
        **({"predictions": [task.name for task in tasks]} if (tasks := tasks_of(model)) else {}),
        "unknown_values": metrics.unknown_values(),
        **(figures(metrics, breakdown) if metrics.examples else {"auc": None, "log_loss": None}),
    }


@contextlib.contextmanager
def _predictions_to(
    output: Path | None, ids_of_batch: Sequence[NDArray[np.object_] | None]
) -> Iterator[Callable[[NDArray[np.float32]], None] | None]:
    """Opens the prediction file; it appears under its name only when it is whole."""
    if output is None:
        yield None
        return
    is_writable = output.parent.is_dir() and os.access(output.parent, os.W_OK)
    if not is_writable or output.is_dir():
        raise UsageError(
            f"--output: cannot write {str(output)!r}: give a file in an existing, writable folder"
        )
    with atomic_file(output) as file:

        def write(predictions: NDArray[np.float32]) -> None:
            values = predictions.reshape(len(predictions), -1)  # [B, K]
            columns = values.T.tolist()
            names = [_DIGITS] * len(columns)
            if ids_of_batch[0] is not None:
                columns.insert(0, ids_of_batch[0].tolist())
                names.insert(0, "%s")
            line = "\t".join(names) + "\n"
            # One format of all lines: a call a line takes four times as long.
            text = line * len(values) % tuple(chain.from_iterable(zip(*columns, strict=True)))
            file.write(text.encode())

        yield write
