"""A script's model, and the job that trains it."""

import logging
from dataclasses import dataclass

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ps_worker.checkpoints.attachments import attachments_of_model
from ctr_ps.ps_worker.data.slot_values import SlotValues
from ctr_ps.ps_worker.job import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model to train, by the sections [train], [optimizer], [life], [strategy] and [cluster] of a job."""

    model: Model
    job: Job

    def __post_init__(self) -> None:
        """Raises UsageError for a model that could not be saved: now, not after hours of training."""
        if not self.attachments():
            logger.warning(
                "checkpoints will have only parameters, which `ps-worker infer` cannot use: class %s is "
                "neither of this package nor a PyTorch module in an importable file",
                getattr(self.model, "module_class", type(self.model)).__qualname__,
            )

    def attachments(self, values: SlotValues | None = None) -> dict[str, bytes]:
        """Returns the files that `ps-worker infer` reads; none for a model that does not know its options."""
        return attachments_of_model(self.model, self.job, values)
