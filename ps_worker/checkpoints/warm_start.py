"""Warm start: a run that takes a saved model, or parts of one, and initializes the rest."""

from collections.abc import Collection
from dataclasses import dataclass

from ctr_model.models.model import Model
from ctr_model.schema import Schema
from protos.errors import JobError
from ps_server.checkpoint.reader import Checkpoint
from ps_worker.checkpoints.attachments import SCHEMA_ATTACHMENT, schema_of_checkpoint
from ps_worker.job import Job
from ps_worker.job.model import names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Parameters taken from a checkpoint.

    Attributes:
        checkpoint: Its url.
        taken: Tables and dense blocks taken from it.
        fresh: Those with initial values.
    """

    checkpoint: str
    taken: list[str]
    fresh: list[str]


def warm_start_of(job: Job, model: Model) -> WarmStart | None:
    """Returns what a job takes from the model that it starts from; None: it names no model.

    Raises:
        JobError: If `checkpoint.only` names something that the model does not have.
    """
    checkpoint = job.checkpoint
    if not checkpoint.load:
        return None
    names = names_of(model)
    if strange := sorted(set(checkpoint.only) - set(names)):
        raise job.error(
            "checkpoint.only",
            f"checkpoint.only names {', '.join(strange)}, but the model has only {', '.join(names)}",
        )
    return warm_start(checkpoint.load, model, checkpoint.only)


def warm_start(url: str, model: Model, only: Collection[str]) -> WarmStart:
    """Returns what a model takes from a checkpoint; `only` names parts of the model, or nothing for all."""
    names = names_of(model)
    taken = sorted(only) or names
    return WarmStart(
        checkpoint=url, taken=taken, fresh=[name for name in names if name not in taken]
    )


def require_schema(job: Job, schema: Schema, folder: str, *, takes_dense: bool) -> None:
    """Refuses a checkpoint whose schema gives keys, or the numbers that are taken, another meaning.

    Without the dense parameters numbers may be others, as long as the slots and their hash are the same.

    Raises:
        JobError: If it was trained with such a schema.
        CheckpointError: If there is no checkpoint.
    """
    checkpoint = Checkpoint.open(folder)
    if SCHEMA_ATTACHMENT not in checkpoint.attachments:
        return
    saved = schema_of_checkpoint(checkpoint)
    if takes_dense and saved.fingerprint != schema.fingerprint:
        raise _other_schema(job, checkpoint, "schema")
    if _keys_of(saved) != _keys_of(schema):
        raise _other_schema(job, checkpoint, "slots or another hash of them in its schema")


def _keys_of(schema: Schema) -> tuple[object, ...]:
    """Returns what the keys of values depend on."""
    return schema.slots, schema.slot_numbers, schema.hash_version


def _other_schema(job: Job, checkpoint: Checkpoint, what: str) -> JobError:
    return job.error(
        "data.schema",
        f"{checkpoint.url!r} was trained with another {what}: name that one in data.schema, or start without "
        f"checkpoint.load",
    )
