"""Offline inference: a saved model, some files, no servers."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos.errors import CheckpointError, JobError, ProtocolError, UsageError
from protos.futures import Answered
from protos.gradients import Values
from protos.keys import Keys
from protos.store import Future, Missing, Pulled, Version
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.saved_model import SavedModel
from ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    schema_of_checkpoint,
)
from ps_worker.data.files.atomic_file import atomic_file
from ps_worker.data.files.listing import matching_files
from ps_worker.job.datasets import streamed
from ps_worker.job.model import errors_of_model
from ps_worker.training.evaluator import evaluate, figures


def infer(
    model_dir: str,
    data: Sequence[str],
    *,
    output: Path | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Predicts the rows of files with a saved model.

    Args:
        model_dir: A checkpoint, or a folder of checkpoints, whose newest is taken.
        data: Patterns of files; empty: the test files of the job that trained the model.
        output: Where to write one click probability a line, in the order of the rows. No malformed row is
            passed over then, unless overridden: line n is that of row n.
        overrides: `section.key=value`, over the job that trained the model.

    Returns:
        Number of rows, the model's digest, and for labelled rows the figures of the evaluation.

    Raises:
        CtrPsError: If model, job or data are wrong.
    """
    checkpoint = Checkpoint.open(model_dir)
    strict = [] if output is None else ["data.bad_row_limit=0"]
    job = job_of_checkpoint(checkpoint, [*strict, *overrides])
    schema = schema_of_checkpoint(checkpoint)
    files = matching_files(data or job.data.test)
    if not files:
        raise JobError("no data to predict: give --data, or train with data.test")
    checkpoint.verify()
    dataset = streamed(job, schema)
    dataset.set_filelist(files)
    with errors_of_model(job), _predictions_to(output) as write:
        metrics = evaluate(
            _SavedStore(SavedModel(checkpoint)),
            model_of_checkpoint(checkpoint, job, schema),
            dataset,
            batch_size=job.train.batch_size,
            on_predictions=write,
        )
    return {
        "rows": dataset.rows,
        "bad_rows": dataset.bad_rows,
        "model_digest": checkpoint.digest_of_files(),
        **(figures(metrics) if metrics.examples else {"auc": None, "log_loss": None}),
    }


@dataclass(frozen=True, slots=True)
class _SavedStore:
    """A saved model as a `ParameterReader`, always at version 0."""

    saved: SavedModel

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        if missing is not Missing.ZEROS:
            raise ProtocolError(f"keys without a saved row read as zeros, not as {missing.name}")
        return Answered(Pulled({name: self.saved.read(name, keys[name]) for name in keys}, 0))

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        for name, vector in into.items():
            saved = self.saved.dense.get(name)
            if saved is None or saved.shape != vector.shape:
                raise CheckpointError(
                    f"checkpoint {self.saved.checkpoint.url} has no dense block {name!r} of length "
                    f"{vector.size}: it is of another model"
                )
            vector[:] = saved
        return Answered(0)


@contextlib.contextmanager
def _predictions_to(
    output: Path | None,
) -> Iterator[Callable[[NDArray[np.float32]], None] | None]:
    """Opens the prediction file; it appears under its name only when it is whole."""
    if output is None:
        yield None
        return
    is_writable = output.parent.is_dir() and os.access(output.parent, os.W_OK)
    if not is_writable or output.is_dir():
        raise UsageError(
            f"--output: cannot write {str(output)!r}: give the path of a file in a folder that is there"
        )
    with atomic_file(output) as file:

        def write(predictions: NDArray[np.float32]) -> None:
            np.savetxt(file, predictions, fmt="%.7f")

        yield write
