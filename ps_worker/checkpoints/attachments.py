"""Files that a checkpoint carries besides parameters: the job, the schema, and the user's own model code."""

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from ctr_model.models.model import Model
from ctr_model.models.origin import origin_of
from ctr_model.registry import name_of
from ctr_model.schema import Schema
from protos.errors import CheckpointError, UsageError
from ps_server.checkpoint.reader import Checkpoint
from ps_worker.data.slot_values import SlotValues
from ps_worker.job import Job, saved_job
from ps_worker.job.model import DENSE_BLOCK, model_of, own_model_file
from ps_worker.job.sections.section import ModelSection, require_json
from ps_worker.job.specs import dense_spec

logger = logging.getLogger(__name__)

JOB_ATTACHMENT = "job.json"
SCHEMA_ATTACHMENT = "schema.json"
MODEL_ATTACHMENT = "model.py"
VALUES_ATTACHMENT = "values.json"


def attachments_of(job: Job, schema: Schema, values: SlotValues | None = None) -> dict[str, bytes]:
    """Returns the files that describe a model besides its parameters, by name.

    Args:
        job: How it is trained.
        schema: The columns of its data.
        values: What the values of slots were in them.
    """
    attachments = {
        JOB_ATTACHMENT: job.to_json().encode(),
        SCHEMA_ATTACHMENT: json.dumps(schema.to_dict(), indent=1).encode(),
        VALUES_ATTACHMENT: (values or SlotValues()).to_json().encode(),
    }
    own_file = own_model_file(job)
    if own_file is not None:
        attachments[MODEL_ATTACHMENT] = own_file.read_bytes()
    return attachments


def attachments_of_model(
    model: Model, job: Job, values: SlotValues | None = None
) -> dict[str, bytes]:
    """Returns the attachments of a model that Python code has made; none for one that does not say how.

    Args:
        model: Its class is one of this package or a module of PyTorch in a file, or else there are none.
        job: How it is trained; its section [model] does not count.
        values: See `attachments_of`.

    Raises:
        UsageError: If the model has an option that a job could not have.
    """
    origin, name = origin_of(model), name_of(model)
    if origin is None or name is None:
        return {}
    for option, value in origin.options.items():
        _require_saveable(name, option, value)
    section = ModelSection.model_validate({"name": name, **origin.options})
    return attachments_of(job.model_copy(update={"model": section}), origin.schema, values)


def _require_saveable(model: str, option: str, value: Any) -> None:
    """Raises UsageError for an option that a job file could not have: `ps-worker infer` reads one."""
    if option == "name":
        raise UsageError(
            f"model {model}: an option cannot be called 'name', which [model] has itself"
        )
    try:
        require_json(value)
    except ValueError as error:
        raise UsageError(f"model {model}: option {option}: {error}") from error


def schema_of_checkpoint(checkpoint: Checkpoint) -> Schema:
    """Returns the schema that the checkpoint was trained with.

    Raises:
        CheckpointError: If the checkpoint has no schema, or one of another feature hash than this release's.
    """
    try:
        return Schema.from_dict(checkpoint.json_attachment(SCHEMA_ATTACHMENT))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.attachment_url(SCHEMA_ATTACHMENT)}: {error}") from error


def values_of_checkpoint(checkpoint: Checkpoint) -> SlotValues:
    """Returns what the values of slots were in the data of a saved model; empty: it does not say.

    Raises:
        CheckpointError: If its attachment says nothing that can be read.
    """
    if VALUES_ATTACHMENT not in checkpoint.attachments:
        return SlotValues()
    try:
        return SlotValues.from_json(checkpoint.attachment(VALUES_ATTACHMENT))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.attachment_url(VALUES_ATTACHMENT)}: {error}") from error


def job_of_checkpoint(checkpoint: Checkpoint, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that trained a saved model; warns if the user's own model is other code now.

    Args:
        checkpoint: The saved model.
        overrides: `section.key=value`, over the job.

    Raises:
        CtrPsError: If the checkpoint has no job, or an invalid one.
    """
    data = checkpoint.json_attachment(JOB_ATTACHMENT)
    job = saved_job(data, overrides, source=f"{JOB_ATTACHMENT} of the checkpoint")
    _warn_of_other_code(checkpoint, job)
    return job


def require_consent(
    url: str,
    job: Job,
    keys: Iterable[str],
    *,
    allow_code: bool,
    overrides: Sequence[str] = (),
) -> None:
    """Refuses the code that the job of a checkpoint names, unless the caller has it run; logs what is run.

    Whoever writes a checkpoint chooses that code. What an override names is the caller's own.

    Args:
        url: Of the checkpoint.
        job: Its job.
        keys: Of the job, which name the code that is about to be run.
        allow_code: Whether it may be.
        overrides: `section.key=value`, over the job.

    Raises:
        UsageError: If there is such code, and `allow_code` is False.
    """
    code = {
        "model.name": job.model.name if own_model_file(job) else "",
        "data.pipe_command": job.data.pipe_command,
    }
    own = {override.partition("=")[0].strip() for override in overrides}
    for key in keys:
        value = code[key]
        if not value:
            continue
        if not allow_code and key not in own:
            raise UsageError(
                f"checkpoint {url} names code to run, {key} = {value!r}: allow it, if you trust "
                f"whoever could write there, by --allow-code, in Python allow_code=True"
            )
        logger.info("runs code: %s = %r", key, value)


def model_of_checkpoint(checkpoint: Checkpoint, job: Job, schema: Schema) -> Model:
    """Returns the model of a job, whose dense parameters are those of a checkpoint.

    Runs the job's code: `require_consent` comes before.

    Raises:
        JobError: If there is no such model, or an option is wrong.
        CheckpointError: If its tensors have other names or shapes than those that were saved, or are in
            another order: values would be read as parameters of other layers.
    """
    model = model_of(job, schema)
    saved = checkpoint.blocks.get(DENSE_BLOCK)
    if saved is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.url} has no dense block {DENSE_BLOCK!r}: it is of no model"
        )
    if difference := saved.layout_difference(dense_spec(model, job)):
        raise CheckpointError(
            f"checkpoint {checkpoint.url} is of other code of {job.model.name}: it was saved with "
            f"{difference}; the code that was trained is its {MODEL_ATTACHMENT}, if the model is your own"
        )
    return model


def _warn_of_other_code(checkpoint: Checkpoint, job: Job) -> None:
    path = own_model_file(job)
    if path is None or MODEL_ATTACHMENT not in checkpoint.attachments or not path.is_file():
        return
    if path.read_bytes() != checkpoint.attachment(MODEL_ATTACHMENT):
        logger.warning(
            "%s differs from the code that was trained, which is in %s",
            path,
            checkpoint.attachment_url(MODEL_ATTACHMENT),
        )
