"""What a worker does, derived once, before anything runs.

job, model, role --> ModelPlan   what any run trains: specs, the model that trains, terms
+ schema, files  --> Plan        a training job, checked against all that one process can see
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.protos.role import HeterRole, Members, WorkerRole
from ctr_ps.protos.store import ReduceOp, Store
from ctr_ps.ps_worker.checkpoints.retention import require_other_folder
from ctr_ps.ps_worker.checkpoints.warm_start import warm_start_of
from ctr_ps.ps_worker.cluster.open_store import LOCAL
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.data.files.listing import FileStamp, matching_files, signature_of, stamp_of
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.checks import (
    require_base_rate,
    require_device,
    require_life,
    require_optimizers,
)
from ctr_ps.ps_worker.job.datasets import evaluated, format_of_job
from ctr_ps.ps_worker.job.model import (
    ModelSpecs,
    model_of,
    specs_of,
    trained_model,
    with_rates_of_tables,
)
from ctr_ps.ps_worker.job.streams import TrainingStream
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.meter import Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches

logger = logging.getLogger(__name__)

_LONGEST_SETTING = 1000
_MOST_NAMED = 5

_NAMES_OF_FILES = {"train", "test", "valid", "schema_source"}
"""Settings of [data] that may differ from machine to machine, while what they name is the same."""


class DenseTrainers(Protocol):
    """Other processes that train the dense parameters for this worker (`extras/heter`)."""

    def attend(self, number: int, name: str, *, size: int = 0, op: ReduceOp | None = None) -> None:
        """Announces barrier `number` of the job; `size` numbers of an all-reduce are reduced by `op`."""

    def close(self) -> None:
        """Closes the connections."""


class PassTrainer(Protocol):
    """Trains passes on a device (`extras/device_pass`)."""

    # the store may have a part of a pass: a write back began and did not end
    is_partly_written: bool

    def train(
        self,
        batches: Batches,
        after_pass: Callable[[], None] | None = None,
        is_told_to_end: Callable[[], bool] | None = None,
    ) -> None:
        """Trains on each batch once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassParts:
    """What a run has for a trainer of passes."""

    model: Model  # computes the gradients
    specs: ModelSpecs
    store: Store  # in which all is declared
    push_ids: PushIds
    progress: Progress
    non_finite: NonFiniteBatches


NewPassTrainer = Callable[[PassParts], PassTrainer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What a process of a run trains, and in which role."""

    specs: ModelSpecs  # the model and the job, and what follows from the two
    role: WorkerRole | HeterRole
    trained: Model  # computes gradients; `model` predicts
    # settings in which all workers must agree, by the names that users know
    terms: Mapping[str, str]
    new_pass_trainer: NewPassTrainer | None = None  # of what trains where `device.tables` is "pass"

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.specs.model

    @property
    def job(self) -> Job:
        """How it is trained."""
        return self.specs.job


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ModelPlan):
    """A training job that was checked before anything runs."""

    schema: Schema  # the columns of its data
    train_files: list[str]  # of all workers
    test_files: list[str]  # evaluated after training; empty: no evaluation
    valid_files: list[str]  # evaluated while training; empty: no validation
    stamps: Mapping[str, FileStamp | None]  # of all these files, as they must be when they are read
    signatures: Mapping[str, str]  # of the three lists, by the keys of the job that name them


def model_plan_of(
    model: Model,
    job: Job,
    role: WorkerRole | HeterRole = LOCAL,
    *,
    new_pass_trainer: NewPassTrainer | None = None,
) -> ModelPlan:
    """Returns the plan of a process that trains a model as a job says, with data of whatever kind.

    Raises JobError if the model cannot be trained in the job's precision.
    """
    return ModelPlan(
        specs=specs_of(model, job),
        role=role,
        trained=trained_model(job, model, worker=role.worker_index),
        terms=terms_of(job, role.members),
        new_pass_trainer=new_pass_trainer,
    )


def checked_model_plan(
    model: Model,
    job: Job,
    role: WorkerRole | HeterRole = LOCAL,
    *,
    new_pass_trainer: NewPassTrainer | None = None,
) -> ModelPlan:
    """Returns the plan of a process, whose job gets the learning rates of the model's tables.

    Raises JobError if precision, optimizers, rates to start at, the life of rows or the device are wrong.
    """
    require_optimizers(job, model)
    require_base_rate(job, model)
    job = with_rates_of_tables(job, model)
    plan = model_plan_of(model, job, role, new_pass_trainer=new_pass_trainer)
    require_life(plan.specs)
    require_device(plan.specs)
    return plan


def heter_plan_of(job: Job, role: HeterRole) -> ModelPlan:
    """Returns a heter trainer's plan of a training job.

    Raises JobError if schema or model are wrong, or as `checked_model_plan` says.
    """
    return checked_model_plan(model_of(job, _schema_of(job)), job, role)


def plan_of(
    job: Job, role: WorkerRole = LOCAL, *, new_pass_trainer: NewPassTrainer | None = None
) -> Plan:
    """Returns a worker's plan of a training job.

    Raises:
        JobError: If schema, format, model, precision, optimizers, the life of rows, the device, the start or
            a slot to evaluate by are wrong.
        DataError: If a pattern matches no file, or files to evaluate have no rows or lack columns.
        CheckpointError: If checkpoints cannot be where the job says.
    """
    schema = _schema_of(job)
    model = model_of(job, schema)
    of_model = checked_model_plan(model, job, role, new_pass_trainer=new_pass_trainer)
    job = of_model.job
    with job.errors("data.format", UsageError):
        format_of_job(job)
    warm_start_of(job, of_model.model)
    _require_order(job)
    if job.data.stream:
        TrainingStream(job, schema, role.worker_index, role.num_workers)  # checks it
    require_other_folder(job)
    breakdown_of(job, schema)
    files: dict[str, list[str]] = {}
    for name in ("train", "test", "valid"):
        with _errors_of_data(job, f"data.{name}"):
            files[name] = matching_files(getattr(job.data, name))
    stamps = {path: stamp_of(path) for each in files.values() for path in each}
    signatures = {f"data.{name}": signature_of(each, stamps) for name, each in files.items()}
    plan = Plan(
        specs=of_model.specs,
        role=role,
        trained=of_model.trained,
        terms={**of_model.terms, **_terms_of_data(job, schema, signatures)},
        new_pass_trainer=new_pass_trainer,
        schema=schema,
        train_files=files["train"],
        test_files=files["test"],
        valid_files=files["valid"],
        stamps=stamps,
        signatures=signatures,
    )
    _warn_of_overlaps(files)
    for name in ("test", "valid"):
        with _errors_of_data(job, f"data.{name}"):  # before hours of training
            evaluated(job, schema, files[name], stamps).require_rows()
    return plan


def terms_of(job: Job, members: Members) -> dict[str, str]:
    """Returns the settings of any run in which its workers must agree."""
    names = ("model", "optimizer", "life")
    return {
        **members.terms,
        **{
            f"train.{key}": str(value)
            for key, value in job.train.model_dump(exclude={"log_every_s"}).items()
        },
        "cluster.lease_s": str(job.cluster.lease_s),
        "cluster.on_worker_loss": job.cluster.on_worker_loss,
        **{
            f"{name}.{key}": json.dumps(value)
            for name in names
            for key, value in getattr(job, name).model_dump(mode="json").items()
        },
        **{f"strategy.{key}": json.dumps(value) for key, value in job.strategy.in_use().items()},
    }


def _terms_of_data(job: Job, schema: Schema, signatures: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a training job in which its workers must agree besides."""
    return {
        "schema": schema.fingerprint,
        "checkpoint.resume": str(job.checkpoint.resume),
        **{
            f"data.{name}": _short(str(value))
            for name, value in job.data.model_dump(exclude=_NAMES_OF_FILES).items()
        },
        **signatures,
        **{f"valid.{name}": str(value) for name, value in job.valid.model_dump().items()},
    }


def _short(value: str) -> str:
    """Returns a setting as a term: of a long one, as the names of thousands of columns, a digest too."""
    if len(value) <= _LONGEST_SETTING:
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:16]
    return f"{value[:_LONGEST_SETTING]}... (digest {digest})"


def _warn_of_overlaps(files: Mapping[str, Sequence[str]]) -> None:
    for name in ("test", "valid"):
        if shared := sorted(set(files["train"]) & set(files[name])):
            logger.warning(
                "%s of data.%s %s also trained on, so metrics do not show the quality on new rows: %s",
                counted(len(shared), "file"),
                name,
                "is" if len(shared) == 1 else "are",
                ", ".join(shared[:_MOST_NAMED]) + (", ..." if len(shared) > _MOST_NAMED else ""),
            )


def _schema_of(job: Job) -> Schema:
    with job.errors("data.schema", ValueError):
        return Schema.load(job.data.schema_source)


def _require_order(job: Job) -> None:
    """Refuses a run that could not resume from its own checkpoints."""
    checkpoint, data = job.checkpoint, job.data
    if checkpoint.resume and checkpoint.is_within_epochs and not data.has_order:
        raise job.error(
            "data.reader_num",
            f"data.reader_num is {data.reader_num}, but a run can resume in the middle of an epoch only "
            f"where rows have an order: set data.reader_num = 1 or data.in_memory = true, or save between "
            f"epochs only (checkpoint.every_steps = 0, checkpoint.every_s = 0)",
        )


@contextmanager
def _errors_of_data(job: Job, key: str) -> Iterator[None]:
    """Has a DataError begin with the key of the job that names the files."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{job.place_of(key)}: {key}: {error}") from error
