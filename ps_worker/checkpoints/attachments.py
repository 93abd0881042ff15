"""What a checkpoint says of its model besides parameters: the job, and the user's own code."""

import json
import logging
from collections.abc import Sequence

from protos.errors import CheckpointError
from ps_server.checkpoint.reader import Checkpoint
from ps_worker.job import Job, stored_job
from ps_worker.run.run import (
    JOB_ATTACHMENT,
    MODEL_ATTACHMENT,
    own_model_file,
)

logger = logging.getLogger(__name__)


def job_of_checkpoint(checkpoint: Checkpoint, overrides: Sequence[str] = ()) -> Job:
    """Returns the job that trained a saved model; warns if the user's own model is other code now.

    Args:
        checkpoint: The saved model.
        overrides: `section.key=value`, over the job.

    Raises:
        CtrPsError: If there is none, or it is not one.
    """
    source = f"{JOB_ATTACHMENT} of the checkpoint"
    try:
        data = json.loads(checkpoint.attachment(JOB_ATTACHMENT))
    except ValueError as error:
        raise CheckpointError(f"{source} is not JSON: {error}") from error
    job = stored_job(data, overrides, source=source)
    _warn_of_other_code(checkpoint, job)
    return job


def _warn_of_other_code(checkpoint: Checkpoint, job: Job) -> None:
    path = own_model_file(job)
    if path is None or MODEL_ATTACHMENT not in checkpoint.attachments or not path.is_file():
        return
    if path.read_bytes() != checkpoint.attachment(MODEL_ATTACHMENT):
        logger.warning(
            "%s is not the code that was trained; that is in %s",
            path,
            checkpoint.attachment_url(MODEL_ATTACHMENT),
        )
