"""The schema that a checkpoint was trained with."""

import json

from ctr_model.schema import Schema
from protos.errors import CheckpointError
from ps_server.checkpoint.reader import Checkpoint

SCHEMA_ATTACHMENT = "schema.json"


def schema_of_checkpoint(checkpoint: Checkpoint) -> Schema:
    """Returns the schema under which the checkpoint's keys mean what they meant.

    Raises:
        CheckpointError: If there is none, or its keys are of another feature hash than this release's.
    """
    try:
        return Schema.from_dict(json.loads(checkpoint.attachment(SCHEMA_ATTACHMENT)))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.attachment_url(SCHEMA_ATTACHMENT)}: {error}") from error
