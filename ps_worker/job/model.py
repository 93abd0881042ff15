"""The model of a job, and the names of its parameters on the servers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.parameters import ModelInputError
from ctr_ps.ctr_model.registry import build_model, with_compute, with_dropout, with_logit_offset
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_worker.job.job import Job
from ctr_ps.ps_worker.job.reading import first_named

DENSE_BLOCK = "dense"
"""The one dense block of a model: all its dense parameters in one flat vector."""


def model_of(job: Job, schema: Schema) -> Model:
    """Returns the model of a job for a schema; raises JobError if the model or an option is wrong."""
    try:
        return build_model(job.model.name, schema, job.model.options, seed=job.train.seed)
    except ValueError as error:
        raise _error_of_options(job, error) from error


def _error_of_options(job: Job, error: ValueError) -> JobError:
    """Returns the error of the option, or the key in it, that a message begins with or names."""
    fault = str(error)
    named = re.match(r"\w+(\.\w+)*", fault)
    if named and named[0].partition(".")[0] in job.model.options:
        return job.error(f"model.{named[0]}", f"model.{fault}")
    return job.error(f"model.{first_named(job.model.options, error) or 'name'}", fault)


def trained_model(job: Job, model: Model, *, worker: int = 0) -> Model:
    """Returns the model that computes a worker's gradients; `model` predicts.

    They differ in the precision, in dropout, and in the logit's offset where negatives are left out. Raises
    JobError if that needs PyTorch, which is not installed, or the model has its own arithmetic or loss, or no
    layers for the job's dropout.
    """
    try:
        trained = with_compute(model, job.train.compute)
    except ValueError as error:
        raise job.error("train.compute", str(error)) from error
    # Workers number their batches alike, and so draw by different seeds.
    seed = xxhash.xxh3_64_intdigest(f"{job.train.seed} {worker}".encode())
    try:
        trained = with_dropout(trained, job.train.dropout, seed)
    except ValueError as error:
        raise job.error("train.dropout", str(error)) from error
    try:
        return with_logit_offset(trained, job.data.logit_offset)
    except ValueError as error:
        raise job.error("data.negative_correction", str(error)) from error


@contextmanager
def errors_of_model(job: Job) -> Iterator[None]:
    """Turns a ModelInputError about a model's input or output into a JobError with the model's name."""
    try:
        yield
    except ModelInputError as error:
        raise job.error("model.name", f"model {job.model.name!r}: {error}") from error


def own_model_file(job: Job) -> Path | None:
    """Returns the file of a user's own model; None for a model of this package."""
    path, _, _ = job.model.name.rpartition(":")
    return Path(path) if path.endswith(".py") else None


def names_of(model: Model) -> list[str]:
    """Returns the names of a model's tables and dense block, sorted."""
    return sorted([*(table.name for table in model.tables), DENSE_BLOCK])
