"""Files that a checkpoint carries besides parameters: the job, the schema, and the user's own model code."""

import json
import logging
from collections.abc import Iterable, Sequence

from ctr_ps.ctr_model.models.model import Model, origin_of
from ctr_ps.ctr_model.registry import name_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, dense_spec, model_of, own_model_file
from ctr_ps.ps_worker.job.sections import ModelSection, require_json

logger = logging.getLogger(__name__)

JOB_ATTACHMENT = "job.json"
SCHEMA_ATTACHMENT = "schema.json"
MODEL_ATTACHMENT = "model.py"
VALUES_ATTACHMENT = "values.json"


def attachments_of(job: Job, schema: Schema, values: SlotValues | None = None) -> dict[str, bytes]:
    """Returns the files that describe a model besides its parameters, by name."""
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
    """Returns the attachments of a model built in Python; empty if it cannot be built again from them.

    Its class must be of this package, or a PyTorch module in a file; the job's section [model] is ignored.
    Raises UsageError for an option that a job file cannot express.
    """
    origin, name = origin_of(model), name_of(model)
    if origin is None or name is None:
        return {}
    for option, value in origin.options.items():
        if option == "name":
            raise UsageError(
                f"model {name}: an option cannot be called 'name', a key of [model] itself"
            )
        try:
            require_json(value)
        except ValueError as error:
            raise UsageError(f"model {name}: option {option}: {error}") from error
    section = ModelSection.model_validate({"name": name, **origin.options})
    return attachments_of(job.model_copy(update={"model": section}), origin.schema, values)


def schema_of_checkpoint(checkpoint: Checkpoint) -> Schema:
    """Returns the schema of the training; CheckpointError without one, or for another feature hash."""
    try:
        return Schema.from_dict(checkpoint.json_attachment(SCHEMA_ATTACHMENT))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.attachment_url(SCHEMA_ATTACHMENT)}: {error}") from error


def values_of_checkpoint(checkpoint: Checkpoint) -> SlotValues:
    """Returns the kinds of slot values in the training data; empty if unknown. Raises CheckpointError."""
    if VALUES_ATTACHMENT not in checkpoint.attachments:
        return SlotValues()
    try:
        return SlotValues.from_json(checkpoint.attachment(VALUES_ATTACHMENT))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.attachment_url(VALUES_ATTACHMENT)}: {error}") from error


def job_of_checkpoint(checkpoint: Checkpoint, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that trained a saved model; warns if a custom model's code has changed.

    `overrides` are `section.key=value`. Raises CtrPsError if the checkpoint has no job, or an invalid one.
    """
    data = checkpoint.json_attachment(JOB_ATTACHMENT)
    job = override_job(data, overrides, source=f"{JOB_ATTACHMENT} of the checkpoint")
    path, is_known = own_model_file(job), MODEL_ATTACHMENT in checkpoint.attachments
    if (
        path is not None
        and is_known
        and path.is_file()
        and path.read_bytes() != checkpoint.attachment(MODEL_ATTACHMENT)
    ):
        url = checkpoint.attachment_url(MODEL_ATTACHMENT)
        logger.warning("%s differs from the trained code in %s", path, url)
    return job


def require_consent(
    url: str,
    job: Job,
    keys: Iterable[str],  # keys of the job that name the code about to run
    *,
    allow_code: bool,  # whether to run it
    overrides: Sequence[str] = (),  # `section.key=value`, over the job
) -> None:
    """Refuses code named by a checkpoint's job, unless the caller allows it; logs the code that will run.

    The writer of a checkpoint chooses that code; values in `overrides` are the caller's own. Raises
    UsageError if there is such code, and `allow_code` is False.
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
                f"checkpoint {url} names code to run, {key} = {value!r}: if you trust everybody who can "
                "write to the checkpoint, allow its code with --allow-code, in Python allow_code=True"
            )
        logger.info("the checkpoint runs code: %s = %r", key, value)


def model_of_checkpoint(checkpoint: Checkpoint, job: Job, schema: Schema) -> Model:
    """Returns the model of a job with the dense parameters of a checkpoint.

    Runs the job's code: call `require_consent` first. Raises JobError if there is no such model, or an option
    is wrong; CheckpointError if its tensors differ from the saved ones in names, shapes or order, so that
    values would be read as parameters of other layers.
    """
    model = model_of(job, schema)
    saved = checkpoint.blocks.get(DENSE_BLOCK)
    if saved is None:
        raise CheckpointError(
            f"checkpoint {checkpoint.url} has no dense block {DENSE_BLOCK!r}, so it holds no model"
        )
    if difference := saved.layout_difference(dense_spec(model, job)):
        raise CheckpointError(
            f"checkpoint {checkpoint.url} was saved by other code of {job.model.name}, with {difference}; "
            f"the trained code of a custom model is in its {MODEL_ATTACHMENT}"
        )
    return model
