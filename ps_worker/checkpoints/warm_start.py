"""Warm start: a run that takes a saved model, or parts of it, and initializes the rest."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.checkpoints.attachments import SCHEMA_ATTACHMENT, schema_of_checkpoint
from ctr_ps.ps_worker.checkpoints.resume import compare_settings
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, dense_spec, names_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Parameters taken from a checkpoint."""

    checkpoint: str
    taken: list[str]  # tables and dense blocks taken from it
    fresh: list[str]  # those with initial values


def warm_start_of(job: Job, model: Model) -> WarmStart | None:
    """Returns the parts of the saved model that a job starts from; None: it names no model.

    Raises JobError if `checkpoint.only` names something that the model does not have.
    """
    checkpoint = job.checkpoint
    if not checkpoint.load:
        return None
    names = names_of(model)
    if strange := sorted(set(checkpoint.only) - set(names)):
        raise job.error(
            "checkpoint.only",
            f"checkpoint.only has {', '.join(strange)}, but the tables and blocks of the model are only "
            f"{', '.join(names)}",
        )
    return warm_start(checkpoint.load, model, checkpoint.only)


def warm_start(url: str, model: Model, only: Collection[str]) -> WarmStart:
    """Returns the parts of a checkpoint for a model; `only` names some, or is empty for all."""
    names = names_of(model)
    taken = sorted(only) or names
    return WarmStart(
        checkpoint=url, taken=taken, fresh=[name for name in names if name not in taken]
    )


def require_schema(
    job: Job, model: Model, schema: Schema, folder: str, *, takes_dense: bool, resumes: bool = False
) -> None:
    """Refuses a checkpoint whose schema gives keys, or taken dense inputs, another meaning.

    New slots are allowed at the end, unless a run is resumed: their keys have no rows yet. Warns of other
    options than those of taken dense parameters. Raises JobError if the schema differs in that way, or new
    slots change the layers that are taken; CheckpointError if there is no checkpoint.
    """
    checkpoint = Checkpoint.open(folder)
    if takes_dense and not resumes:
        compare_settings(job, checkpoint, resumes=False)
    if SCHEMA_ATTACHMENT not in checkpoint.attachments:
        return
    saved = schema_of_checkpoint(checkpoint)
    if saved.fingerprint == schema.fingerprint:
        return
    if resumes or _difference_of_keys(saved, schema):
        raise _other_schema(job, checkpoint, saved, schema)
    new = schema.slots[len(saved.slots) :]
    if takes_dense:
        if _without_last_slots(schema, len(new)).fingerprint != saved.fingerprint:
            raise _other_schema(job, checkpoint, saved, schema)
        _require_same_layers(job, model, checkpoint, new)
    if new:
        logger.info("slots without rows in %s: %s", checkpoint.url, ", ".join(new))


def _difference_of_keys(saved: Schema, schema: Schema) -> str:
    """Returns the difference in keys of the saved slots; "" without any."""
    if saved.hash_version != schema.hash_version:
        return f"hash_version was {saved.hash_version} and is {schema.hash_version}"
    for number, was in enumerate(saved.slots):
        if number == len(schema.slots):
            return f"slot {was!r} is missing"
        if (now := schema.slots[number]) != was:
            return f"slot {number + 1} was {was!r} and is {now!r} (new slots come last)"
        if saved.slot_numbers[number] != schema.slot_numbers[number]:
            return (
                f"slot {was!r} had the keys of {saved.slots[saved.slot_numbers[number] - 1]!r}, but now has "
                f"those of {schema.slots[schema.slot_numbers[number] - 1]!r}"
            )
    return ""


def _difference_of_numbers(saved: Schema, schema: Schema) -> str:
    """Returns the difference in dense columns; "" without any."""
    was, now = ({column.name: column for column in each.dense} for each in (saved, schema))
    scaled = [name for name in was if name in now and was[name] != now[name]]
    faults = {"missing": was.keys() - now, "new": now.keys() - was, "scaled otherwise": scaled}
    listed = [f"{what}: {', '.join(sorted(names)[:5])}" for what, names in faults.items() if names]
    return f"numbers {'; '.join(listed)}" if listed else ""


def _without_last_slots(schema: Schema, count: int) -> Schema:
    kept = schema.slots[: len(schema.slots) - count]
    shares = {slot: target for slot, target in schema.shares.items() if slot in kept}
    return replace(schema, slots=kept, shares=shares)


def _require_same_layers(
    job: Job, model: Model, checkpoint: Checkpoint, new: Sequence[str]
) -> None:
    block = checkpoint.blocks.get(DENSE_BLOCK)
    difference = "" if block is None else block.layout_difference(dense_spec(model, job))
    if difference:
        tables = [name for name in names_of(model) if name in checkpoint.tables]
        raise job.error(
            "checkpoint.only",
            f"the new slots {', '.join(new)} change the layers of the model: {checkpoint.url!r} was saved "
            f"with {difference}; to load only its rows, with new layers, set checkpoint.only = {tables}",
        )


def _other_schema(job: Job, checkpoint: Checkpoint, saved: Schema, schema: Schema) -> JobError:
    difference = _difference_of_keys(saved, schema) or _difference_of_numbers(saved, schema)
    difference = difference or "new slots, another order, label, weight or split"
    return job.error(
        "data.schema",
        f"{checkpoint.url!r} was trained with another schema: {difference}: name that schema in data.schema, "
        f"or start without checkpoint.load",
    )
