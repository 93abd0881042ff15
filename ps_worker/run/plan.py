"""A job checked against all that one process can see: schema, files, model, checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctr_model.models.model import Model
from ctr_model.schema import Schema
from protos.errors import DataError, UsageError, counted
from ps_worker.checkpoints.retention import require_other_folder
from ps_worker.checkpoints.warm_start import warm_start_of
from ps_worker.data.files.listing import FileStamp, matching_files, stamp_of
from ps_worker.data.files.signature import signature_of
from ps_worker.job import Job
from ps_worker.job.checks import require_base_rate, require_device, require_life, require_optimizers
from ps_worker.job.datasets import evaluated, format_of_job
from ps_worker.job.model import model_of, trained_model
from ps_worker.job.specs import with_rates_of_tables
from ps_worker.training.evaluation.breakdown import breakdown_of

logger = logging.getLogger(__name__)

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job that was checked before anything runs.

    Attributes:
        job: What to do.
        schema: The columns of its data.
        model: For these columns.
        train_files: Of all workers.
        test_files: Evaluated after training; empty: no evaluation.
        valid_files: Evaluated while training; empty: no validation.
        stamps: Of all these files, as they must be when they are read.
        signatures: Of the three lists, by the keys of the job that name them.
    """

    job: Job
    schema: Schema
    model: Model
    train_files: list[str]
    test_files: list[str]
    valid_files: list[str]
    stamps: Mapping[str, FileStamp | None]
    signatures: Mapping[str, str]


def plan_of(job: Job) -> Plan:
    """Returns the job with its schema, model and files.

    Raises:
        JobError: If schema, format, model, precision, optimizers, the life of rows, the device, the start or
            a slot to evaluate by are wrong.
        DataError: If a pattern matches no file, or files to evaluate have no rows or lack columns.
        CheckpointError: If checkpoints cannot be where the job says.
    """
    schema, model = model_of_job(job)
    job = with_rates_of_tables(job, model)
    _require_format(job)
    warm_start_of(job, model)
    _require_order(job)
    require_other_folder(job)
    breakdown_of(job, schema)
    patterns = {"train": job.data.train, "test": job.data.test, "valid": job.data.valid}
    files = {name: _files_of(job, f"data.{name}", each) for name, each in patterns.items()}
    stamps = {path: stamp_of(path) for each in files.values() for path in each}
    plan = Plan(
        job=job,
        schema=schema,
        model=model,
        train_files=files["train"],
        test_files=files["test"],
        valid_files=files["valid"],
        stamps=stamps,
        signatures={f"data.{name}": signature_of(each, stamps) for name, each in files.items()},
    )
    _warn_of_overlaps(files)
    _require_rows(plan, "data.test", plan.test_files)
    _require_rows(plan, "data.valid", plan.valid_files)
    return plan


def _warn_of_overlaps(files: Mapping[str, Sequence[str]]) -> None:
    for name in ("test", "valid"):
        if shared := sorted(set(files["train"]) & set(files[name])):
            logger.warning(
                "%s of data.%s %s trained on as well, so its figures say little of new rows: %s",
                counted(len(shared), "file"),
                name,
                "is" if len(shared) == 1 else "are",
                ", ".join(shared[:_MOST_NAMED]) + (", ..." if len(shared) > _MOST_NAMED else ""),
            )


def model_of_job(job: Job) -> tuple[Schema, Model]:
    """Returns the schema and the model of a job.

    Raises:
        JobError: If they are wrong, or the precision, the optimizers, the life of rows or the device.
    """
    schema = _schema_of(job)
    model = model_of(job, schema)
    trained_model(job, model)
    require_optimizers(job, model)
    require_base_rate(job, model)
    require_life(job, model)
    require_device(job, model)
    return schema, model


def _schema_of(job: Job) -> Schema:
    try:
        return Schema.load(job.data.schema_source)
    except ValueError as error:
        raise job.error("data.schema", str(error)) from error


def _require_format(job: Job) -> None:
    try:
        format_of_job(job)
    except UsageError as error:
        raise job.error("data.format", str(error)) from error


def _require_order(job: Job) -> None:
    """Refuses a run that could not resume from its own checkpoints."""
    checkpoint, data = job.checkpoint, job.data
    has_order = data.reader_num == 1 or data.in_memory
    if checkpoint.resume and checkpoint.is_within_epochs and not has_order:
        raise job.error(
            "data.reader_num",
            f"data.reader_num is {data.reader_num}, but a run can resume in the middle of an epoch only "
            f"where rows have an order: set data.reader_num = 1 or data.in_memory = true, or save between "
            f"epochs only (checkpoint.every_steps = 0, checkpoint.every_s = 0)",
        )


def _require_rows(plan: Plan, key: str, files: Sequence[str]) -> None:
    """Refuses files to evaluate whose first rows cannot be read, before hours of training."""
    dataset = evaluated(plan.job, plan.schema, files, plan.stamps)
    try:
        dataset.require_rows()
    except DataError as error:
        raise _error_of_data(plan.job, key, error) from error


def _files_of(job: Job, key: str, patterns: Sequence[str]) -> list[str]:
    try:
        return matching_files(patterns)
    except DataError as error:
        raise _error_of_data(job, key, error) from error


def _error_of_data(job: Job, key: str, error: DataError) -> DataError:
    return DataError(f"{job.place_of(key)}: {key}: {error}")
